"""The server that is checked: what it is, and conversations with it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from headrace.checkup.answer import Answer, Ask, Malformed, Step, Stream
from headrace.checkup.dialects import Dialect
from headrace.checkup.http import Http, OutOfReach, Refused, Reply, authorization

#: What agents append, and a URL may end with already.
SUFFIX = "/v1"
NO_ROUTE = (404, 405, 501)


class Target:
    """One server. `gateway`: it has Headrace's routes, and every conversation is a trajectory in `channel`."""

    def __init__(self, http: Http, url: str, *, model: str | None, channel: str, admin_key: str | None) -> None:
        self.http = http
        self.url = url.rstrip("/").removesuffix(SUFFIX)
        self.model = model or ""
        self.gateway = False
        #: Whether answers may be asked for their ids; a server that refuses unknown fields is not asked again.
        self.asks_ids = True
        #: Why the gateway's trajectories cannot be read; empty while they can.
        self.closed = ""
        self._channel = channel
        self._admin = authorization(admin_key) if admin_key else None
        self._begun: Any = None

    @property
    def kind(self) -> str:
        return "headrace gateway" if self.gateway else "OpenAI-compatible server"

    async def find(self) -> None:
        """What it is, and the model that it serves."""
        base = self.url
        try:
            begun = await self._init()
            self.gateway = isinstance(begun, dict) and isinstance(begun.get("base_url"), str)
            if self.gateway:
                base, self._begun = begun["base_url"], begun
        except Refused as error:
            if error.status not in (400, 422, *NO_ROUTE):
                raise OutOfReach(f"{self.url}/init_trajectory answers {error}") from error
        if self.model:
            return
        try:
            found = (await self.http.get(f"{base}{SUFFIX}/models")).body
        except Refused as error:
            if error.status not in NO_ROUTE:
                raise OutOfReach(f"{base}{SUFFIX}/models answers {error}") from error
            raise OutOfReach(f"{base}{SUFFIX}/models answers {error}; give the API's address, and --model") from error
        cards = found.get("data") if isinstance(found, dict) else None
        named = [card["id"] for card in cards if isinstance(card, dict) and card.get("id")] if cards else []
        if not named:
            raise OutOfReach(f"{base}{SUFFIX}/models names no model; give --model")
        self.model = str(named[0])

    async def begin(self, dialect: Dialect) -> Conversation:
        if not self.gateway:
            return Conversation(self, dialect, self.url, None)
        begun, self._begun = self._begun or await self._init(), None
        return Conversation(self, dialect, begun["base_url"], begun["trajectory_uid"])

    async def _init(self) -> Any:
        return (await self.http.post(f"{self.url}/init_trajectory", {"channel": self._channel})).body

    async def told(self, path: str, body: Any = None) -> Any:
        """What a route that need not be there answers; None where it is not, or is closed."""
        try:
            url = self.url + path
            return (await (self.http.get(url, self._admin) if body is None else self.http.post(url, body))).body
        except Refused:
            return None

    async def steps(self, uid: str) -> list[Step]:
        """What was recorded of a trajectory, in order; none, and `closed` says why, where it cannot be read."""
        try:
            found = (await self.http.get(f"{self.url}/trajectories/{quote(uid, safe='')}", self._admin)).body
        except Refused as error:
            self.closed = str(error)
            return []
        return [
            Step(
                step["prompt_ids"],
                step["response_ids"],
                step.get("rollout_log_probs"),
                step.get("policy_version"),
                step.get("quarantined"),
            )
            for step in found["steps"]
        ]


class Conversation:
    """Calls that belong together, in one dialect."""

    def __init__(self, target: Target, dialect: Dialect, base: str, uid: str | None) -> None:
        self.target, self.dialect, self.uid = target, dialect, uid
        self._base = base
        self._answers: list[Answer] = []

    async def ask(self, ask: Ask) -> list[Answer]:
        """The answers to a question, streamed or not; `Refused` or `Malformed` where there are none."""
        return (await self.streamed(ask))[0]

    async def streamed(self, ask: Ask) -> tuple[list[Answer], Stream]:
        """The answers, and how their stream was."""
        reply = await self._send(ask)
        try:
            if ask.stream and reply.events is None:
                raise Malformed("a stream was asked for, and the answer is none")
            stream = Stream(reply.body) if reply.events is None else self.dialect.join(reply.events)
            answers = self.dialect.read(stream.body)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise Malformed(f"the answer is not of the dialect's shape: {type(error).__name__}: {error}") from error
        for answer in answers:
            answer.check()
            answer.version = reply.headers.get("x-headrace-policy-version")
        self._answers += answers
        return answers, stream

    async def _send(self, ask: Ask) -> Reply:
        url, wanted = self._base + self.dialect.path, self.target.asks_ids
        try:
            return await self.target.http.post(url, self.dialect.body(replace(ask, ids=wanted), self.target.model))
        except Refused as error:
            if not wanted or error.status not in (400, 422):
                raise
            reply = await self.target.http.post(url, self.dialect.body(replace(ask, ids=False), self.target.model))
            self.target.asks_ids = False
            return reply

    async def end(self) -> list[Answer]:
        """Every answer of the conversation, in order, with what was recorded of it."""
        if self.uid is None:
            return self._answers
        steps = [] if self.target.closed else await self.target.steps(self.uid)
        if len(steps) == len(self._answers):
            for answer, step in zip(self._answers, steps, strict=True):
                answer.step = step
        elif not self.target.closed:
            raise Malformed(f"{len(self._answers)} answers were given and {len(steps)} steps recorded")
        with contextlib.suppress(Refused):  # ending it may need another key; open, it is in nobody's batch either
            await self.target.http.post(f"{self.target.url}/complete_trajectory/{quote(self.uid, safe='')}")
        return self._answers
