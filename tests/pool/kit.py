"""Steps, groups and questions for tests of the pool."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from headrace import DataPool, Step
from headrace.pool.batch import Batch
from headrace.pool.calls import BlockingPool
from headrace.pool.http import pool_routes

#: Seconds after which a test that waits for what must come gives up.
SOON = 120.0


class Clock:
    """A clock that stands still until it is told to move."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += seconds


def answer(uid: str, index: int) -> list[int]:
    """Two ids that no other step samples."""
    first = zlib.crc32(f"{uid}/{index}".encode()) & 0x3FFFFFFF
    return [first, first + 1]


def step(uid: str = "t", index: int | None = 0, prompt: str = "", *, last: bool = False, **fields: Any) -> Step:
    """A step whose prompt extends the steps before it, as an agent's history does."""
    turns = range(index or 0)
    made: dict[str, Any] = {
        "prompt_ids": [1, 2, 3, *(token for turn in turns for token in answer(uid, turn))],
        "response_ids": answer(uid, index or 0),
        "rollout_log_probs": [-0.5, -0.25],
        "trajectory_uid": uid,
        "prompt_uid": prompt or uid,
        "step_index": index,
        "is_last": last,
    }
    return Step(**{**made, **fields})


def trajectory(uid: str, turns: int = 1, prompt: str = "", **fields: Any) -> list[Step]:
    return [step(uid, i, prompt, last=i == turns - 1, **fields) for i in range(turns)]


def group(prompt: str, n: int = 1, turns: int = 1, **fields: Any) -> list[Step]:
    """The steps of `n` complete trajectories, `PROMPT/0` to `PROMPT/n-1`, turn by turn."""
    made = [trajectory(f"{prompt}/{i}", turns, prompt, **fields) for i in range(n)]
    return [one for turn in zip(*made, strict=True) for one in turn]


def fetched(pool: BlockingPool, batch_size: int = 1, **options: Any) -> Batch:
    """A batch that must be there, or come soon."""
    batch = pool.fetch_batch(batch_size, **{"timeout": SOON, **options})
    assert batch is not None
    return batch


def prompts(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [found.prompt_uid for found in batch.groups]


def keys(steps: list[Step]) -> list[tuple[str, int | None]]:
    return [(found.trajectory_uid, found.step_index) for found in steps]


def until_blocked(pool: BlockingPool, calls: int = 1) -> None:
    """Returns once so many calls wait in the pool."""
    give_up = time.monotonic() + SOON
    while pool.stats()["waiting"] < calls:
        assert time.monotonic() < give_up, "nothing blocks"


def drain(pool: BlockingPool, **options: Any) -> list[str]:
    """Takes every ready group, one at a time; their prompts, in the order in which they came."""
    found = []
    while (batch := pool.fetch_batch(1, timeout=0, **options)) is not None:
        found += prompts(batch)
    return found


def ledger(pool: BlockingPool, channel: str = "train") -> dict[str, Any]:
    """The ledger's columns, the drops by reason beside the others, zeros left out."""
    found = dict(pool.stats(channel)["ledger"])
    found |= found.pop("dropped")
    return {name: value for name, value in found.items() if value}


def events(pool: BlockingPool, kind: str) -> list[dict[str, Any]]:
    return [event.detail for event in pool.events() if event.kind == kind]


def rows(ask: Callable[..., dict[str, Any]], **filters: Any) -> list[dict[str, Any]]:
    """A whole listing, page by page."""
    found: list[dict[str, Any]] = []
    cursor: Any = 0
    while cursor is not None:
        page = ask(cursor=cursor, limit=3, **filters)
        found += page["items"]
        cursor = page["next"]
    return found


def check_conservation(pool: BlockingPool) -> None:
    """What must hold at every moment: no step is nowhere, none is in two places, and the listings agree."""
    stats = pool.stats()
    assert stats["balanced"]
    for name, channel in stats["channels"].items():
        book = channel["ledger"]
        dropped = sum(book["dropped"].values())
        placed = book["queued"] + book["leased"] + book["consumed"] + dropped + book["quarantined"]
        assert book["submitted"] == placed, (name, book)
        assert min(book["queued"], book["leased"], book["consumed"], dropped, book["quarantined"]) >= 0
        listed = rows(lambda name=name, **f: pool.list_groups(name, **f))
        assert sum(row["steps"] for row in listed) == book["queued"] + book["leased"]
        assert len(listed) == channel["groups"]["queued"] + channel["groups"]["leased"]
        assert len(rows(lambda name=name, **f: pool.list_trajectories(name, **f))) == channel["trajectories"]


class Threads:
    """Calls in threads of their own. One that never returns fails its test, and does not hold up the run."""

    def submit(self, call: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args, **options))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


class Host:
    """One web server for a whole test run; each pool has a place of its own on it."""

    def __init__(self) -> None:
        self._app = Starlette()
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app, port=0, log_level="warning", ws="none", lifespan="off", timeout_graceful_shutdown=5
            )
        )
        self._count = 0

    @contextmanager
    def running(self) -> Iterator[Host]:
        thread = threading.Thread(target=self._server.run, name="test-host", daemon=True)
        thread.start()
        try:
            while not self._server.started:
                thread.join(0.01)
                assert thread.is_alive(), "the web server did not start"
            yield self
        finally:
            self._server.should_exit = True
            thread.join(SOON)

    @contextmanager
    def serving(self, pool: DataPool) -> Iterator[str]:
        """The address at which a pool answers."""
        self._count += 1
        mount = Mount(f"/{self._count}", routes=pool_routes(pool))
        self._app.routes.append(mount)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        try:
            yield f"http://127.0.0.1:{port}/{self._count}"
        finally:
            self._app.routes.remove(mount)
