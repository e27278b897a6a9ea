"""An agent's loop with tools on the `openai` SDK: call the model, run what it calls, until it calls nothing.

headrace serve --engine tiny                       # in another terminal; for vLLM see docs/gateway.md
python examples/gateway_openai_tools.py [http://127.0.0.1:8100]
"""

import json
import sys

import httpx
from openai import OpenAI

gateway = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
integers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
parameters = {"properties": integers, "required": ["a", "b"], "type": "object"}
tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}]

begun = httpx.post(f"{gateway}/init_trajectory").json()
client = OpenAI(base_url=begun["base_url"], api_key="not-needed")
messages = [{"role": "user", "content": "What is 2 + 3?"}]
for _ in range(8):
    answer = client.chat.completions.create(model="any", messages=messages, tools=tools, temperature=0, max_tokens=64)
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        try:
            given = json.loads(call.function.arguments)
            result = str(given["a"] + given["b"])
        except (ValueError, KeyError, TypeError) as error:  # the model may call with anything
            result = f"error: {error}"
        print(f"{call.function.name}({call.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print("answer:", repr(message.content))
reward = float("5" in (message.content or ""))
print(httpx.post(f"{begun['base_url']}/complete_trajectory", json={"reward": reward}).json())
