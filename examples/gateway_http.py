"""A flow that handles tokens itself, over plain HTTP: sample with /generate, hand its own steps in.

headrace serve --engine tiny                       # in another terminal; for vLLM see docs/gateway.md
python examples/gateway_http.py [http://127.0.0.1:8100]
"""

import json
import sys
import urllib.request
import uuid
from typing import Any

gateway = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(gateway + path, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))


uid = uuid.uuid4().hex
first = post("/generate", {"messages": [{"role": "user", "content": "Guess a number."}], "max_tokens": 16})
# Ids go on with ids (these tell the model to guess again): nothing that was sampled is encoded anew.
longer = first["prompt_ids"] + first["response_ids"] + first["prompt_ids"]
second = post("/generate", {"prompt_ids": longer, "sampling_params": {"max_tokens": 16, "temperature": 0.7}})
steps = [
    {
        **{name: call[name] for name in ("prompt_ids", "response_ids", "policy_version", "sampling")},
        "rollout_log_probs": call["log_probs"],
        "metadata": {"log_probs": call["logprobs_mode"]},  # of which temperature they are
        "trajectory_uid": uid,
        "step_index": index,
        "is_last": index == 1,
        "reward": float("7" in call["response_text"]),
    }
    for index, call in enumerate((first, second))
]
print("first:", post("/submit_steps", {"steps": steps}))
print("again:", post("/submit_steps", {"steps": steps}))
