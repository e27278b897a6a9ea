"""What an Atropos environment says on the wire: it registers, waits for the trainer, and posts groups that it scored.

headrace serve --engine tiny --serve-channel train               # in another terminal; see docs/atropos.md
python examples/atropos_environment.py [http://127.0.0.1:8100]   # beside atropos_trainer.py or atropos_fetch.py
"""

import random
import sys
import time

import httpx

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8100"
GROUPS, GROUP_SIZE, PROMPT = 2, 4, [11, 12, 13]
about = {"max_token_length": 4096, "desired_name": "example", "weight": 1.0, "group_size": GROUP_SIZE}
rng = random.Random(0)

with httpx.Client(base_url=address, timeout=60) as api:
    while (env := api.post("/register-env", json=about).json())["status"] != "success":
        time.sleep(0.1)  # the trainer has not asked for its first batch yet
    for _ in range(GROUPS):
        answers = [[rng.randrange(1000) for _ in range(5)] for _ in range(GROUP_SIZE)]
        group = {
            "env_id": env["env_id"],
            "tokens": [PROMPT + answer for answer in answers],
            "masks": [[-100] * len(PROMPT) + answer for answer in answers],
            "inference_logprobs": [[1.0] * len(PROMPT) + [-0.5] * len(answer) for answer in answers],
            "scores": [float(answer[-1] % 2) for answer in answers],
        }
        print(api.post("/scored_data", json=group).raise_for_status().json())
    print(api.post("/disconnect-env", json={"env_id": env["env_id"]}).json())
