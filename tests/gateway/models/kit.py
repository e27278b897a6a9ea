"""A provider that answers as told and keeps what it was sent, and gateways with a file of models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tests.gateway.kit import Running, running_gateway, serving

from headrace import DataPool

Json = dict[str, Any]


@dataclass
class Asked:
    """One call as it reached the provider."""

    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Provider:
    """Somebody else's API. `parts` are the pieces of a streamed answer; with `cut` it breaks off after them."""

    address: str = ""
    status: int = 200
    answer: bytes = b'{"id": "x",  "object":"whatever"}'
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    cut: bool = False
    asked: list[Asked] = field(default_factory=list)

    async def call(self, request: Request) -> Response:
        body = await request.body()
        self.asked.append(Asked(request.url.path, request.url.query, dict(request.headers), body))
        if self.parts:
            return StreamingResponse(self._parts(), self.status, self.headers, "text/event-stream")
        return Response(self.answer, self.status, {"content-type": "application/json", **self.headers})

    async def _parts(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part
        if self.cut:
            raise ConnectionError("as told")


@contextmanager
def provided() -> Iterator[Provider]:
    provider = Provider()
    app = Starlette(routes=[Route("/{rest:path}", provider.call, methods=["POST"])])
    with serving(app, lifespan=False) as provider.address:
        yield provider


@contextmanager
def with_models(
    pool: DataPool, addresses: str, folder: Path, file: Path, models: Json, default: str | None = None, **settings: Any
) -> Iterator[Running]:
    """A gateway with these models beside the one at `addresses`."""
    file.write_text(json.dumps({"models": models, **({"default": default} if default else {})}))
    with running_gateway(pool, addresses, folder, models=str(file), **settings) as gateway:
        yield gateway
