"""A gateway in this process, on real sockets, and what the engine behind it says that it did.

Nothing here asks the gateway what was sampled: `Evidence` holds recorded steps to the engine's own record.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import psutil
from tests.engine.kit import Client

from headrace import DataPool, Step
from headrace.gateway import Settings, create_app
from headrace.net.server import Server
from headrace.pool.remote import RemotePool

Json = dict[str, Any]

#: Seconds between two questions whether something holds, at first and at most; and for how long it is asked.
SOON_S, SELDOM_S, PATIENCE_S = 0.002, 0.05, 300


@contextmanager
def serving(app: Any, *, lifespan: bool = True, grace_s: int | None = 5, port: int = 0) -> Iterator[str]:
    """The address of an application that is served until the block ends."""
    server = Server(app, "127.0.0.1", port, lifespan=lifespan, grace_s=grace_s)
    bound = threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"ready": lambda _: bound.set()}, daemon=True)
    thread.start()
    assert bound.wait(120), "the application did not start"
    try:
        yield server.address
    finally:
        server.stop()
        thread.join(120)
        assert not thread.is_alive(), "the application did not end"


def workers_of(gateway: subprocess.Popen[str]) -> list[psutil.Process]:
    """The workers of a gateway's process that its fork server forked."""
    children = psutil.Process(gateway.pid).children(recursive=True)
    return [child for child in children if child.ppid() != gateway.pid]


class Running:
    """One gateway, as its callers reach it, and the pool behind it."""

    def __init__(self, address: str, pool: DataPool | RemotePool, app: Any = None) -> None:
        self.address = address
        self.pool = pool
        self.app = app
        self.http = httpx.Client(base_url=address, timeout=240, trust_env=False)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """`path` may also be a whole address, such as a base_url with more behind it."""
        return self.http.get(path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """`body` is sent as JSON; bytes are sent as they are."""
        sent: Json = {"content": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
        return self.http.post(path, **sent, **options)

    def init(self, **body: Any) -> Json:
        """A new trajectory: its trajectory_uid, prompt_uid and base_url."""
        found: Json = told(self.post("/init_trajectory", body or None))
        return found

    def complete(self, uid: str, **body: Any) -> Json:
        found: Json = told(self.post(f"/complete_trajectory/{quote(uid, safe='')}", body or None))
        return found

    def steps(self, uid: str) -> list[Step]:
        """What the pool holds of a trajectory, in the order of its indices."""
        return list(self.pool.trajectory(uid).steps)

    def counted(self, name: str) -> Any:
        """One of the gateway's counters, or None."""
        return told(self.get("/stats"))["gateway"].get(name)


def forced_calls(order: Json) -> list[str]:
    """How each call begins that the structural tag of an order to a rollout server lets pass."""
    form = json.loads(order["structured_outputs"]["structural_tag"])["format"]
    ways = form["elements"] if form["type"] == "or" else [form]
    return [way["elements"][0]["value"] for way in ways]


def told(answer: httpx.Response) -> Any:
    """What a call that went well answered."""
    assert answer.status_code == 200, (answer.status_code, answer.text)
    return answer.json()


@contextmanager
def running_gateway(
    pool: DataPool | RemotePool,
    addresses: str | Sequence[str],
    folder: str | Path,
    *,
    outbox_file: Path | None = None,
    drain_s: float | None = 5,
    until_ready: bool = True,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> Iterator[Running]:
    """A gateway on a pool, in front of the rollout servers at these addresses, that is ready unless told otherwise."""
    named = addresses if isinstance(addresses, str) else ",".join(addresses)
    given = Settings(vllm_addresses=named, tokenizer_path=str(folder), **settings)
    app = create_app(pool, given, outbox_file=outbox_file, drain_s=drain_s, clock=clock)
    with serving(app) as address:
        gateway = Running(address, pool, app)
        try:
            if until_ready:
                await_ready(address)
            yield gateway
        finally:
            gateway.http.close()


def await_ready(address: str) -> None:
    """Returns once a gateway takes calls."""
    with httpx.Client(timeout=240, trust_env=False) as http:
        until(lambda: http.get(f"{address}/ready").status_code == 200)


def until(holds: Callable[[], bool]) -> None:
    """Asks until something that others see to holds."""
    pause_s, end = SOON_S, time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.2, SELDOM_S)


class Evidence:
    """What an engine consumed and sampled since this was made, in the order in which its answers ended."""

    def __init__(self, engine: Client) -> None:
        self._engine = engine
        self._before = {_name(call) for call in self._all()}

    def _all(self) -> list[Json]:
        found: list[Json] = self._engine.get("/debug/calls")["calls"]
        return found

    def calls(self) -> list[Json]:
        return [call for call in self._all() if _name(call) not in self._before]

    def holds(self, steps: Sequence[Step]) -> None:
        """Each step is one answer of the engine, bit for bit, and no answer is missing among the steps."""
        left = self.includes(steps)
        assert not left, f"the engine gave answers that are no steps: {left}"

    def includes(self, steps: Sequence[Step]) -> list[Json]:
        """Each step is one answer of the engine, bit for bit; the answers that are no step."""
        left = self.calls()
        for step in steps:
            same = [call for call in left if _same(step, call)]
            assert same, f"step {step.step_index} is no answer of the engine: {step.to_dict()}\nit gave {left}"
            left.remove(same[0])
        return left


def _name(call: Json) -> tuple[str, int]:
    return call["request_id"], call["index"]


def _same(step: Step, call: Json) -> bool:
    return (
        step.prompt_ids.tolist() == call["prompt_token_ids"]
        and step.response_ids.tolist() == call["token_ids"]
        and step.rollout_log_probs is not None
        and np.array_equal(step.rollout_log_probs, np.asarray(call["logprobs"], np.float32))
    )


def tokens(step: Step) -> list[int]:
    """A step's prompt and response."""
    return [*step.prompt_ids.tolist(), *step.response_ids.tolist()]


def tree(steps: Sequence[Step]) -> list[int | None]:
    """Of each step, the index of the longest earlier one that its prompt begins with, bit for bit."""
    parents: list[int | None] = []
    for at, step in enumerate(steps):
        prompt = step.prompt_ids.tolist()
        whole = [(len(tokens(other)), i) for i, other in enumerate(steps[:at])]
        fits = [(size, i) for size, i in whole if prompt[:size] == tokens(steps[i])]
        parents.append(max(fits)[1] if fits else None)
    return parents
