"""A trainer's side of a sync: weights, and what transformers says of a run of tokens under them."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.engine.kit import Client, Reference, gap
from tests.gateway.kit import Running, serving

from headrace.trainer.sync import Probe, Publisher, SyncConfig

IDS = [1, 50, 60, 70, 71, 90, 12, 300, 41, 5, 7, 33]
PROMPT = [1, 50, 60, 70]
#: Tokens of an answer that make some text: the first may be no letter yet.
SHOWN = 64


class Trained:
    """A checkpoint as a trainer holds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = Reference(folder)
        self.config = self.reference.model.config

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self.reference.model.state_dict()
        return found

    @property
    def probe(self) -> Probe:
        return Probe(IDS, self.reference.logprobs(IDS[:1], IDS[1:]))

    def sampled(self, engine: Client) -> float:
        """How far an engine's log-probs of an answer are from those of these weights."""
        found = engine.complete(PROMPT, max_tokens=20, seed=3, temperature=1.0, ignore_eos=True)
        return gap(found["logprobs"]["token_logprobs"], self.reference.logprobs(PROMPT, found["token_ids"]))


def address(engine: Client) -> str:
    return f"http://{engine.host}"


@contextmanager
def publisher(gateway: Running | str | None = None, **config: Any) -> Iterator[Publisher]:
    given = {"gateway": gateway.address if isinstance(gateway, Running) else gateway}
    yield Publisher(SyncConfig(**{"timeout_s": 60, **given, **config}))


def states(gateway: Running) -> dict[str, tuple[str, int]]:
    """Of each server that a gateway knows, its state and version."""
    found = gateway.get("/servers").json()["servers"]
    return {server["address"]: (server["state"], server["version"]) for server in found}


class Stream:
    """A streamed chat through a gateway, read in a thread of its own."""

    def __init__(self, gateway: Running, base: str, tokens: int) -> None:
        self._asked = {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": True,
        }
        self._url = f"{base}/v1/chat/completions"
        self._begun = threading.Event()
        self.error: str | None = None
        self.chunks = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._begun.wait(120), "the stream never began"

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._asked, timeout=240, trust_env=False) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    said = json.loads(line[6:])
                    if "error" in said:
                        self.error = said["error"]["message"]
                        continue
                    if any(choice["delta"].get("content") for choice in said["choices"]):
                        self.chunks += 1
                        self._begun.set()
        self._begun.set()

    def ended(self) -> None:
        self._thread.join(240)
        assert not self._thread.is_alive(), "the stream never ended"


class Between:
    """Stands before an engine and passes everything on, but what a test has it answer itself, by path."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[str] = []


@contextmanager
def between(target: str) -> Iterator[Between]:
    found = Between(target)
    sessions: list[aiohttp.ClientSession] = []

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with aiohttp.ClientSession() as session:
            sessions.append(session)
            yield

    async def relay(request: Request) -> Response:
        path, body = request.url.path, await request.body()
        found.asked.append(path)
        if path in found.answers:
            status, said = found.answers[path]
            return JSONResponse(said, status)
        url = f"{found.target}{path}?{request.url.query}"
        headers = {"content-type": "application/json"}
        answer = await sessions[0].request(request.method, url, data=body, headers=headers)

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in answer.content.iter_any():
                    yield part
            finally:
                answer.close()

        return StreamingResponse(parts(), answer.status, media_type=answer.headers.get("content-type"))

    app = Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])], lifespan=lifespan)
    with serving(app) as found.address:
        yield found
