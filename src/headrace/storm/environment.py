"""An environment and a trainer of the Trajectory API: groups are posted under a key until they are received, and taken
by a trainer that names the last batch it has. Each group is told from all others by its first token.

The trainer speaks with the API without a link between: a batch whose last byte the network has taken counts as
delivered (docs/atropos.md), so one that a link swallowed would be lost by right.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import orjson

from headrace.net.async_client import AsyncHttpClient
from headrace.net.http_answer import HttpAnswer, NoAnswer
from headrace.storm.log import EventLog

#: Sequences of a group, and of a batch: each batch is one group.
SEQUENCES = 2
#: Seconds between two groups, and between tries at what is not there.
POST_EVERY_S = 0.05
RETRY_S = 0.1
TRY_S = 30.0
#: A step count that no storm reaches: the trainer never ends by itself.
STEPS = 10**9

REGISTRATION: dict[str, Any] = {
    "wandb_group": "storm",
    "wandb_project": "storm",
    "batch_size": SEQUENCES,
    "max_token_len": 512,
    "checkpoint_dir": "unused",
    "save_checkpoint_interval": STEPS,
    "starting_step": 0,
    "num_steps": STEPS,
}
ENVIRONMENT: dict[str, Any] = {
    "max_token_length": 512,
    "desired_name": "storm",
    "weight": 1.0,
    "group_size": SEQUENCES,
}


def group_body(number: int, env_id: int) -> dict[str, Any]:
    """A group that no other looks like."""
    tokens = [[number, number * SEQUENCES + n, 2] for n in range(SEQUENCES)]
    masks = [[-100, *rest] for _, *rest in tokens]
    scores = [round((number * 7 + n) % 13 / 13, 6) for n in range(SEQUENCES)]
    return {"tokens": tokens, "masks": masks, "scores": scores, "env_id": env_id}


class ApiLoad:
    """Posts groups and takes them, both logged. `posts_to` is an address behind a link, `takes_from` tells where the
    API is now."""

    def __init__(self, posts_to: str, takes_from: Callable[[], str], log: EventLog, *, patience_s: float) -> None:
        self._client = AsyncHttpClient(total_s=TRY_S)
        self._posts_to, self._takes_from, self._log = posts_to, takes_from, log
        self._patience_s = patience_s
        self._received: dict[str, str] = {}
        self._env_id = 0
        self.stopping = False
        self._posted_all = False

    async def begin(self) -> None:
        """Registers the trainer, has it ask once, and registers the environment."""
        await self._ask("POST", self._takes_from, "/register", json=REGISTRATION)
        await self._ask("GET", self._takes_from, "/batch")
        found = await self._ask("POST", self._takes_from, "/register-env", json=ENVIRONMENT)
        self._env_id = int(orjson.loads(found.body)["env_id"])

    async def post(self) -> None:
        """Posts groups until it is told to stop."""
        for number in itertools.count(1):
            if self.stopping:
                self._posted_all = True
                return
            body = group_body(number, self._env_id)
            self._log.write("post.sent", group=number, body=body)
            headers = {"idempotency-key": f"storm-{number}"}
            await self._ask("POST", lambda: self._posts_to, "/scored_data", json=body, headers=headers)
            self._log.write("post.acked", group=number)
            await asyncio.sleep(POST_EVERY_S)

    async def take(self) -> None:
        """Takes batches until the queue is empty, once nobody posts any more."""
        while True:
            last = self._posted_all
            answer = await self._ask("GET", self._takes_from, "/batch", headers=self._received)
            batch = orjson.loads(answer.body)["batch"]
            if batch is None:
                if last:
                    return
                await asyncio.sleep(RETRY_S)
                continue
            name = answer.headers.get("headrace-batch", "")
            self._received = {"Headrace-Received": name}
            for group in batch:
                kept = {key: group[key] for key in ("tokens", "masks", "scores", "env_id")}
                self._log.write("taken", batch=name, group=group["tokens"][0][0], body=kept)

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self, method: str, address: Callable[[], str], path: str, **more: Any) -> HttpAnswer:
        """A request, made again until it is answered with 200 or is stuck: then the log has it, and it is made on."""
        begun, told = time.monotonic(), False
        while True:
            try:
                answer = await self._client.request(method, address() + path, **more)
                if answer.status == 200:
                    return answer
                why = f"{answer.status} {answer.body[:200]!r}"
            except NoAnswer as error:
                why = str(error)
            self._log.write("failed", what=path, why=why[:200])
            waited_s = time.monotonic() - begun
            if waited_s > self._patience_s and not told:
                told = True
                self._log.write("stuck", what=path, target="api", waited_s=round(waited_s, 1))
            await asyncio.sleep(RETRY_S)
