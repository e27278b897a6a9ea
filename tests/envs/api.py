"""A Trajectory API to work against, small and in memory, that a test can look into, stop and make fail."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web
from tests.site import Site

Json = dict[str, Any]


class Api:
    """Speaks the contract's routes. `queue` is what waits for the trainer; `posts` is every acknowledged post."""

    def __init__(self, *, batch_size: int = 16, step: int = 0, **registration: Any) -> None:
        self.batch_size, self.step, self.max_token_len = batch_size, step, 64
        self.registration = {"checkpoint_dir": "", "checkpoint_interval": -1, "num_steps": 100, **registration}
        self.started = True
        self.queue: list[Json] = []
        self.received: list[Json] = []
        self.asked: list[tuple[str, Any]] = []
        self.keys: set[str] = set()
        self.environments: list[Json] = []
        self.left: list[int] = []
        #: Decides about a post before it is taken: a status to answer with, or None.
        self.refuse: Callable[[list[Json]], int | None] = lambda groups: None
        #: How many more times a question is answered with 503.
        self.away: dict[str, int] = {}
        #: Set when posts may be looked at.
        self.slow = asyncio.Event()
        self.slow.set()
        #: Answers that are lost on the way, after the post was taken.
        self.lose_answers = 0
        self._changed = asyncio.Condition()
        self._site: Site | None = None
        self._port = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        self._site = Site(
            web.post("/register-env", self._register),
            web.post("/disconnect-env", self._disconnect),
            web.get("/info", self._info),
            web.get("/wandb_info", self._wandb),
            web.get("/status-env", self._status),
            web.post("/scored_data", self._post),
            web.post("/scored_data_list", self._post),
        )
        self._port = await self._site.start(self._port)

    async def stop(self) -> None:
        if self._site is not None:
            await self._site.end()
            self._site = None

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns once something holds, looked at whenever the API was asked for anything."""
        async with self._changed:
            await self._changed.wait_for(holds)

    async def told(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def take(self, sequences: int) -> list[Json]:
        """What the trainer does: takes a batch's worth of groups, which is a step."""
        taken: list[Json] = []
        while sum(len(group["scores"]) for group in taken) < sequences:
            taken.append(self.queue.pop(0))
        self.step += 1
        return taken

    async def _answer(self, what: str, asked: Any, answer: Json, status: int = 200) -> web.Response:
        if self.away.get(what):
            self.away[what] -= 1
            answer, status = {"detail": "not now"}, 503
        self.asked.append((what, asked))
        await self.told()
        return web.json_response(answer, status=status)

    async def _register(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if not self.started:
            return await self._answer("register", asked, {"status": "wait for trainer to start"})
        name = f"{asked['desired_name']}_{len(self.environments)}"
        self.environments.append(asked)
        who = {"env_id": len(self.environments) - 1, "wandb_name": name, "starting_step": self.step}
        return await self._answer("register", asked, {"status": "success", **who, **self.registration})

    async def _disconnect(self, request: web.Request) -> web.Response:
        asked = await request.json()
        self.left.append(asked["env_id"])
        return await self._answer("disconnect", asked, {"status": "success"})

    async def _info(self, request: web.Request) -> web.Response:
        return await self._answer("info", None, {"batch_size": self.batch_size, "max_token_len": self.max_token_len})

    async def _wandb(self, request: web.Request) -> web.Response:
        return await self._answer("wandb_info", None, {"group": "runs", "project": "tests"})

    async def _status(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if asked["env_id"] >= len(self.environments):
            return await self._answer("status", asked, {"detail": "no such environment"}, 404)
        size = self.environments[asked["env_id"]]["group_size"]
        queued = sum(len(group["scores"]) for group in self.queue) // size
        found = {"current_step": self.step, "queue_size": queued, "env_weight": 1.0, "self_queue_size": queued}
        return await self._answer("status", asked, {**found, "unallocated_fraction": 1.0, "max_group_size": size})

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.read()
        found = json.loads(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        groups = found if isinstance(found, list) else [found]
        await self.slow.wait()
        refused = self.refuse(groups)
        if refused is not None:
            return await self._answer("refused", groups, {"detail": "not this one"}, refused)
        key = request.headers["idempotency-key"]
        if key not in self.keys:
            self.keys.add(key)
            self.queue += groups
            self.received += groups
        if self.lose_answers:
            self.lose_answers -= 1
            assert request.transport is not None
            request.transport.abort()
        return await self._answer("post", groups, {"status": "received"})
