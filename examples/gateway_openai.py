"""An agent on the `openai` SDK: its base_url is all that changes, and each of its calls becomes a step.

headrace serve --engine tiny                       # in another terminal; for vLLM see docs/gateway.md
python examples/gateway_openai.py [http://127.0.0.1:8100]
"""

import json
import sys
import urllib.request
from typing import Any

from openai import OpenAI

gateway = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"


def post(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))


# Whoever starts the agent begins a trajectory and hands it the base_url ...
begun = post(f"{gateway}/init_trajectory", metadata={"secret": "7"})

# ... the agent does what it always did ...
client = OpenAI(base_url=begun["base_url"], api_key="not-needed")
messages = [{"role": "user", "content": "Guess a number from 1 to 7."}]
for hint in ("higher", "lower"):
    answer = client.chat.completions.create(model="any", messages=messages, max_tokens=16)
    print("guess:", repr(answer.choices[0].message.content))
    messages += [answer.choices[0].message, {"role": "user", "content": hint}]

# ... and whoever judges it says what it was worth.
won = "7" in (answer.choices[0].message.content or "")
print(post(f"{begun['base_url']}/complete_trajectory", reward=float(won)))
