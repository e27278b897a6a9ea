"""A server of a test's own, in its own loop, that a test can end."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web


class Site:
    """Routes on a port of this machine, which end as a process does: whoever is connected is cut off, whoever asks on a
    connection that was accepted at the last moment too."""

    def __init__(self, *routes: web.RouteDef) -> None:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._while_here])
        app.add_routes(routes)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)  # 0 would wait for ever
        self._asking: set[asyncio.Transport] = set()
        self._ended = False

    async def start(self, port: int = 0) -> int:
        """Listens; the port."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        found: int = self._runner.addresses[0][1]
        return found

    async def end(self) -> None:
        self._ended = True
        for transport in list(self._asking):
            transport.abort()
        await self._runner.cleanup()

    @web.middleware
    async def _while_here(self, request: web.Request, handler: Any) -> web.StreamResponse:
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        if self._ended:
            transport.abort()
            raise web.HTTPServiceUnavailable  # which nobody hears, and what was asked is not done
        self._asking.add(transport)
        try:
            answer: web.StreamResponse = await handler(request)
            return answer
        finally:
            self._asking.discard(transport)
