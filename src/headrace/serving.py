"""An application on a socket: the port is known before it is served, and ending is a return, not a signal."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn


class Server:
    """Serves an application. The port is bound when it is made, so `port=0` is known at once."""

    def __init__(self, app: Any, host: str, port: int, *, closed: Callable[[], None] = lambda: None) -> None:
        """`closed` is called when the last request is answered, however serving ended."""
        self._closed = closed
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((host, port))
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=5, ws="none", lifespan="off"
        )
        self._server = _Announcing(config)

    def run(self, ready: Callable[[str], None] = lambda address: None) -> None:
        """Serves until SIGTERM, SIGINT or `stop`. `ready` is told the address."""
        self._server.announce = lambda: ready(self.address)
        try:
            self._server.run([self._listener])
        finally:
            self._listener.close()
            self._closed()

    def stop(self) -> None:
        self._server.should_exit = True


class _Announcing(uvicorn.Server):
    announce: Callable[[], None] = staticmethod(lambda: None)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Lets `run` return: uvicorn would raise the signal again, before everything is closed."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.announce()
