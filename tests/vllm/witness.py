"""A witness between a gateway and vLLM: it passes everything on, and keeps what was asked and what was answered.

What it keeps are vLLM's own bytes, so recorded steps can be held to them and not to what the gateway says.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import aiohttp
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tests.engine.kit import Json
from tests.gateway.kit import serving

from headrace import Step

SAMPLING = ("/v1/completions", "/inference/v1/generate")


@dataclass
class Choice:
    """One answer of vLLM's: what it consumed, and what it sampled."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, choice: Json) -> None:
        """What a whole answer, or a chunk of a stream, says of it."""
        told = choice["logprobs"] or {}
        self.ids += choice["token_ids"]
        self.log_probs += told.get("token_logprobs") or [entry["logprob"] for entry in told.get("content") or ()]
        self.finish_reason = choice["finish_reason"] or self.finish_reason

    def is_of(self, step: Step) -> bool:
        return (
            step.prompt_ids.tolist() == self.prompt
            and step.response_ids.tolist() == self.ids
            and np.array_equal(step.rollout_log_probs, np.asarray(self.log_probs, np.float32))
        )


class Witness:
    def __init__(self) -> None:
        #: Every request that samples, in the order in which their answers ended, and the choices of its answer.
        self.calls: list[tuple[Json, list[Choice]]] = []
        self._begun = 0
        self._changed = threading.Condition()

    def forget(self) -> None:
        self.calls.clear()
        self._begun = 0

    def begins(self) -> None:
        with self._changed:
            self._begun += 1
            self._changed.notify_all()

    def await_begun(self, count: int) -> None:
        """Returns once so many calls were passed on to vLLM."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._begun >= count, 240), f"only {self._begun} calls came"

    @property
    def asked(self) -> list[Json]:
        return [body for body, _ in self.calls]

    def holds(self, steps: Sequence[Step]) -> None:
        """Each step is one answer of vLLM's, bit for bit, and no answer is missing among the steps."""
        left = [choice for _, choices in self.calls for choice in choices]
        assert len(left) == len(steps)
        for step in steps:
            same = [choice for choice in left if choice.is_of(step)]
            assert same, f"step {step.step_index} is no answer of vLLM's: {step.to_dict()}\nit gave {left}"
            left.remove(same[0])

    def keep(self, body: Json, answer: bytes) -> None:
        if "request_id" not in body:  # a gateway names its calls; without a name it only looks what a server can do
            return
        prompt = body.get("prompt") or body["token_ids"]
        choices: dict[int, Choice] = {}
        # What follows the last end of an event is of one that a hang-up cut.
        events = answer.split(b"\n\n")[:-1] if body.get("stream") else [b"data: " + answer]
        for event in events:
            if event.startswith(b"data: {"):
                said = json.loads(event[6:])
                if body.get("content_parts"):  # what is consumed is then not what is sent
                    prompt = said.get("prompt_token_ids") or prompt
                for choice in said.get("choices", ()):
                    choices.setdefault(choice["index"], Choice(prompt)).take(choice)
        self.calls.append((body, list(choices.values())))


@contextmanager
def witnessed(address: str) -> Iterator[tuple[str, Witness]]:
    """An address that passes everything on to another, and who watches."""
    witness = Witness()
    sessions: list[aiohttp.ClientSession] = []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # A connection is used once: a server may close one that was idle in the moment in which it is used again.
        once, patience = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(600)
        async with aiohttp.ClientSession(connector=once, timeout=patience) as session:
            sessions.append(session)
            yield

    async def relay(request: Request) -> Response:
        body = await request.body()
        path = request.url.path
        url = f"{address}{path}?{request.url.query}"
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        if path in SAMPLING:
            witness.begins()
        answer = await sessions[0].request(request.method, url, data=body, headers=headers)

        async def parts() -> AsyncIterator[bytes]:
            kept = bytearray()
            try:
                async for part in answer.content.iter_any():
                    kept += part
                    yield part
            finally:
                answer.close()
                if path in SAMPLING and answer.status == 200:
                    witness.keep(json.loads(body), bytes(kept))

        return StreamingResponse(parts(), answer.status, media_type=answer.headers.get("content-type"))

    app = Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])], lifespan=lifespan)
    with serving(app) as found:
        yield found, witness
