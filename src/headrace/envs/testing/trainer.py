"""A trainer behind a Trajectory API, in this process: it takes groups as the API would, and is done after so many."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.data.errors import InvalidInput
from headrace.data.scored import read_group, read_groups
from headrace.envs.api_client import ApiClient, ApiRefused

ENV_ID = 0
#: Large enough that the queue never holds an environment up.
BATCH_SIZE = 1 << 20


class Trainer(ApiClient):
    """Every group is a step. `refused` says what the API would not have taken, and why."""

    def __init__(self, steps: int) -> None:
        super().__init__("http://trainer.invalid")
        self.steps = steps
        self.received: list[dict[str, Any]] = []
        self.refused: list[str] = []
        self.left = False

    async def get(self, path: str, body: Any = None) -> dict[str, Any]:
        answers: dict[str, dict[str, Any]] = {
            "/info": {"batch_size": BATCH_SIZE, "max_token_len": -1},
            "/wandb_info": {"group": None, "project": None},
            "/status-env": {
                "current_step": len(self.received) + len(self.refused),
                "queue_size": 0,
                "self_queue_size": 0,
                "max_group_size": 1,
                "env_weight": 1.0,
                "unallocated_fraction": 1.0,
            },
        }
        return answers[path]

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        if path == "/disconnect-env":
            self.left = True
            return {"status": "success"}
        return {
            "status": "success",
            "env_id": ENV_ID,
            "wandb_name": f"{body['desired_name']}_0",
            "checkpoint_dir": "",
            "starting_step": 0,
            "checkpoint_interval": -1,
            "num_steps": self.steps,
        }

    async def post_groups(self, path: str, body: bytes, key: str) -> dict[str, Any]:
        many = path == "/scored_data_list"
        try:
            read_groups(body) if many else read_group(body)
        except InvalidInput as error:
            self.refused.append(str(error))
            raise ApiRefused(str(error)) from error
        groups = orjson.loads(body)
        self.received += groups if many else [groups]
        return {"status": "received"}
