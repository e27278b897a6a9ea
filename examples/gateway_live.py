"""A live service behind the gateway's root: one URL changes, and what people think of an answer comes later.

headrace serve --engine tiny --open                # in another terminal; for vLLM see docs/gateway.md
python examples/gateway_live.py [http://127.0.0.1:8100]
"""

import sys

import httpx
from openai import OpenAI

gateway = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"

client = OpenAI(base_url=f"{gateway}/v1", api_key="not-needed")
messages = [{"role": "user", "content": "Guess a number from 1 to 7."}]
for hint in ("higher", "lower"):
    answer = client.chat.completions.create(model="any", messages=messages, max_tokens=16)
    messages += [answer.choices[0].message, {"role": "user", "content": hint}]  # which finds the conversation again

# Later, perhaps from somewhere else: what the person who asked made of it.
feedback = {"response_id": answer.id, "reward": 1.0, "comment": "thumbs up"}
print(httpx.post(f"{gateway}/v1/feedback", json=feedback).json())
