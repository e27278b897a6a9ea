"""The least that can stand between an agent and a rollout server: bodies pass as they are, and nothing is looked at.

It stands on what the gateway stands on: a raw Starlette route on uvicorn (uvloop, httptools), and aiohttp upstream.

python -m headrace.bench.gateway.proxy UPSTREAM
"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

JSON = {"content-type": "application/json"}
FORWARDED = ("/v1/chat/completions", "/v1/completions")
#: uvicorn closes a connection that was idle for 5 s; ours goes first, so that none is used as it is closed.
KEEP_ALIVE_S = 4.0


def create_app(upstream: str) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield {"session": session}

    async def forward(request: Request) -> Response:
        session: aiohttp.ClientSession = request.state.session
        body = await request.body()
        async with session.post(upstream + request.url.path, data=body, headers=JSON) as answer:
            return Response(await answer.read(), answer.status, media_type=answer.content_type)

    async def health(request: Request) -> Response:
        return Response(b"{}", media_type="application/json")

    routes = [Route(path, forward, methods=["POST"]) for path in FORWARDED]
    return Starlette(routes=[*routes, Route("/health", health)], lifespan=lifespan)


if __name__ == "__main__":
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        print(f"proxy ready on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(create_app(sys.argv[1]), log_level="warning", access_log=False)
        uvicorn.Server(config).run([listener])
