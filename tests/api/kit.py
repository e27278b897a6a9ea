"""A Trajectory API as its clients reach it, and the pool behind it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from tests.atropos.words import environment, registration
from tests.gateway.kit import serving, until

from headrace import DataPool
from headrace.api import TrajectoryApiSettings, create_app

__all__ = ["Api", "Held", "api_on", "connected", "encoded", "hang_up_after", "until"]


class Api:
    """One server's routes; answers that are no 200 are the test's to look at."""

    def __init__(self, address: str, headers: dict[str, str] | None = None) -> None:
        self.address = address
        self.client = httpx.Client(base_url=address, timeout=120, trust_env=False, headers=headers)

    def get(self, path: str, body: Any = None) -> Any:
        answer = self.client.request("GET", path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: Any, **headers: str) -> Any:
        answer = self.client.post(path, content=encoded(body), headers={"content-type": "application/json"} | headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def register(self, **settings: Any) -> Any:
        return self.post("/register", registration(**settings))

    def opened(self, batch_size: int, *group_sizes: int, **more: Any) -> list[int]:
        """A trainer that has asked for its first batch, and environments with these group sizes; their ids."""
        self.register(batch_size=batch_size)
        assert self.get("/batch") == {"batch": None}
        return [self.post("/register-env", environment(size, **more))["env_id"] for size in group_sizes]

    def send(self, *groups: dict[str, Any], **headers: str) -> None:
        for group in groups:
            assert self.post("/scored_data", group, **headers) == {"status": "received"}

    def batch(self) -> list[int]:
        """The groups of the next batch, by their first tokens."""
        return [group["tokens"][0][0] for group in self.get("/batch")["batch"]]

    def queued(self) -> int:
        found: int = self.get("/status")["queue_size"]
        return found

    def close(self) -> None:
        self.client.close()


@contextmanager
def api_on(pool: Any, **settings: Any) -> Iterator[Api]:
    with serving(create_app(pool, TrajectoryApiSettings(**settings))) as address:
        found = Api(address)
        try:
            yield found
        finally:
            found.close()


class Held:
    """A pool of which the next call of a kind, once it was carried out, keeps its answer back until it is let go; with
    `before`, it is not carried out before that."""

    def __init__(self, pool: DataPool, call: str, *, before: bool = False) -> None:
        self.aio = self
        self._pool = pool
        self._call = call
        self._before = before
        self._armed = False
        self.reached = threading.Event()
        self.go = threading.Event()

    def arm(self) -> None:
        self.reached.clear()
        self.go.clear()
        self._armed = True

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._pool.aio, name)
        if name != self._call or not self._armed:
            return call
        self._armed = False

        async def held(*args: Any, **options: Any) -> Any:
            answer = None if self._before else await call(*args, **options)
            self.reached.set()
            await asyncio.to_thread(self.go.wait)
            return await call(*args, **options) if self._before else answer

        return held


def encoded(body: Any) -> bytes:
    """The same bytes for the same body, whoever sends it."""
    return json.dumps(body).encode()


def connected(address: str) -> http.client.HTTPConnection:
    url = httpx.URL(address)
    return http.client.HTTPConnection(url.host, url.port, timeout=120)


def hang_up_after(held: Held, address: str, method: str, path: str, body: Any = None) -> None:
    """A client that hangs up when its call was carried out, before it has an answer."""
    held.arm()
    connection = connected(address)
    try:
        connection.request(method, path, None if body is None else encoded(body))
        assert held.reached.wait(120)
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
    finally:
        connection.close()
    httpx.get(address, timeout=120, trust_env=False)  # once this is answered, the server has seen it hang up
    held.go.set()
