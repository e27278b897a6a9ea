"""An agent's loop on Anthropic's Messages, with a tool: its client's base_url is all that changes.

headrace serve --engine tiny                       # in another terminal; for vLLM see docs/gateway.md
python examples/gateway_anthropic.py [http://127.0.0.1:8100]
"""

import sys

import httpx
from anthropic import Anthropic

gateway = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
integers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
schema = {"properties": integers, "required": ["a", "b"], "type": "object"}
tools = [{"name": "add", "description": "Adds.", "input_schema": schema}]

begun = httpx.post(f"{gateway}/init_trajectory").json()
client = Anthropic(base_url=begun["base_url"], api_key="not-needed")
ask = {"model": "any", "max_tokens": 64, "tools": tools, "extra_body": {"temperature": 0}}
messages = [{"role": "user", "content": "What is 2 + 3?"}]
for _ in range(8):
    answer = client.messages.create(messages=messages, **ask)
    results = []
    for call in (block for block in answer.content if block.type == "tool_use"):
        try:
            result = {"content": str(call.input["a"] + call.input["b"])}
        except (KeyError, TypeError) as error:  # the model may call with anything
            result = {"content": f"error: {error}", "is_error": True}
        print(f"{call.name}({call.input}) = {result['content']}")
        results.append({"type": "tool_result", "tool_use_id": call.id, **result})
    if not results:
        break
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
text = "".join(block.text for block in answer.content if block.type == "text")
print("answer:", repr(text))
print(httpx.post(f"{begun['base_url']}/complete_trajectory", json={"reward": float("5" in text)}).json())
