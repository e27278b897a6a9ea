"""An agent's loop on OpenAI's Responses: the gateway keeps the conversation, and the agent names its last answer.

headrace serve --engine tiny                       # in another terminal; for vLLM see docs/gateway.md
python examples/gateway_openai_responses.py [http://127.0.0.1:8100]
"""

import json
import sys

import httpx
from openai import OpenAI

gateway = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
integers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
parameters = {"properties": integers, "required": ["a", "b"], "type": "object"}
tools = [{"type": "function", "name": "add", "description": "Adds.", "parameters": parameters}]

begun = httpx.post(f"{gateway}/init_trajectory").json()
client = OpenAI(base_url=begun["base_url"], api_key="not-needed")
ask = {"model": "any", "tools": tools, "temperature": 0, "max_output_tokens": 64}
answer = client.responses.create(input="What is 2 + 3?", **ask)
for _ in range(8):
    outputs = []
    for call in (item for item in answer.output if item.type == "function_call"):
        try:
            given = json.loads(call.arguments)
            result = str(given["a"] + given["b"])
        except (ValueError, KeyError, TypeError) as error:  # the model may call with anything
            result = f"error: {error}"
        print(f"{call.name}({call.arguments}) = {result}")
        outputs.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    if not outputs:
        break
    answer = client.responses.create(input=outputs, previous_response_id=answer.id, **ask)
print("answer:", repr(answer.output_text))
reward = float("5" in answer.output_text)
print(httpx.post(f"{begun['base_url']}/complete_trajectory", json={"reward": reward}).json())
