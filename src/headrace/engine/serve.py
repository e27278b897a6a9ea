"""An engine as a process: it listens at once and answers 503 until its model is loaded.

The model is loaded in a daemon thread, so that a signal ends the process while it loads.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.net.server import Server

if TYPE_CHECKING:
    from headrace.engine.engine import Engine


class LoadingApp:
    """Answers 503 until `app` is set, and passes requests to it from then on."""

    def __init__(self, model: str) -> None:
        self._said = orjson.dumps(
            {"error": {"message": f"the model {model} is being loaded", "type": "ServiceUnavailable", "code": 503}}
        )
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app or Response(self._said, 503, {"retry-after": "1"}, "application/json")
        await app(scope, receive, send)


def run(
    server: Server,
    front: LoadingApp,
    load: Callable[[], Engine],
    *,
    listening: Callable[[str], None],
    ready: Callable[[str], None],
) -> None:
    """Serves `front` until SIGTERM or SIGINT, with the engine that `load` returns behind it; raises the error of
    `load`. `listening` and `ready` are called with the address."""
    outcome: list[Engine | BaseException] = []

    def loading() -> None:
        try:
            engine = load()
            from headrace.engine.routes import create_app  # with torch, which `load` may have something to do before

            front.app = create_app(engine)
            outcome.append(engine)
            ready(server.address)
        except BaseException as error:
            outcome.append(error)
            server.stop()

    def begin(address: str) -> None:
        listening(address)
        threading.Thread(target=loading, name="headrace-load", daemon=True).start()

    server.run(begin)
    if not outcome:  # a normal exit while libraries are being loaded may crash
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    outcome[0].close()
