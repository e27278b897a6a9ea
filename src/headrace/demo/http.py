"""A bare HTTP/1.1 client: one kept connection, one JSON request at a time.

An agent is usually an SDK's client, which spends milliseconds on a call. Hundreds of agents that share two cores with
everything else need one that does not.
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import orjson

__all__ = ["Connection", "Failed", "Refused"]

#: A kept connection that was idle for longer may be closed by the server in the moment that it is used.
KEEP_S = 4.0


class Failed(Exception):
    """No answer, or one that says to try again later."""


class Refused(Exception):
    """An answer that would be the same another time."""


class Connection:
    """Connects when it is first used, and again after a failure."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._head = f" HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: "
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used = 0.0

    async def post(self, path: str, value: Any) -> Any:
        return await self._ask("POST", path, orjson.dumps(value))

    async def get(self, path: str) -> Any:
        return await self._ask("GET", path, b"")

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, method: str, path: str, body: bytes) -> Any:
        try:
            status, data = await self._exchange(f"{method} {path}{self._head}{len(body)}\r\n\r\n".encode() + body)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise Failed(f"{path}: {str(error) or type(error).__name__}") from error
        except BaseException:
            self.close()  # an answer may still be on its way: nobody else must read it
            raise
        if status == 200:
            return orjson.loads(data)
        said = f"{path} was answered {status}: {data[:300].decode(errors='replace')}"
        raise Failed(said) if status >= 500 or status == 429 else Refused(said)

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        if self._streams is None or loop.time() - self._used > KEEP_S:
            self.close()
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        at = head.index(b"content-length:") + len(b"content-length:")
        data = await reader.readexactly(int(head[at : head.index(b"\r\n", at)]))
        self._used = loop.time()
        return int(head[9:12]), data
