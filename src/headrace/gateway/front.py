"""The way in: calls that come often are found by splitting their path; everything else goes through FastAPI.

FastAPI's layers cost a call as much as reading it does. The routes taken here are the same ones that it lists: the same
handlers, under the same paths. uids in paths are percent-encoded, so a uid may hold a slash: paths are taken as they
were sent, and parameters are decoded by whoever reads them.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from headrace.gateway.routing import BASE, Handler

_BASE = BASE.encode() + b"/"
_ROOT = b"/v1/"


class Front(FastAPI):
    """An application with a shortcut for the routes below a base URL, and for those without parameters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._short: dict[bytes, Handler] = {}

    def shorten(self, path: str, handler: Handler) -> None:
        """Takes POSTs to a path in front. `/{trajectory_uid}/{prompt_uid}/...` is the only kind with parameters."""
        self._short[path.encode()] = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw: bytes = scope.get("raw_path") or scope["path"].encode()
            if scope["method"] == "POST":
                handler = self._found(scope, raw)
                if handler is not None:
                    answer = await handler(Request(scope, receive, send))
                    await answer(scope, receive, send)
                    return
            if b"%" in raw and not raw.startswith(b"/pool/"):
                scope["path"] = raw.decode("latin-1")
        await super().__call__(scope, receive, send)

    def _found(self, scope: Scope, raw: bytes) -> Handler | None:
        if raw.startswith(_ROOT):  # `/v1/chat/completions` is no trajectory v1 with a prompt chat
            return self._short.get(raw)
        parts = raw.split(b"/", 3)
        if len(parts) == 4 and parts[1] and parts[2]:
            handler = self._short.get(_BASE + parts[3])
            if handler is not None:
                uid, prompt = parts[1].decode("latin-1"), parts[2].decode("latin-1")
                scope["path_params"] = {"trajectory_uid": uid, "prompt_uid": prompt}
                return handler
        return self._short.get(raw)
