"""`http_vs_json`, and the peer that it is measured against: the plain way to serve steps over HTTP, a Starlette route,
a list and orjson, in a child process of its own.

python -m headrace.bench.pool.http FD PROMPT RESPONSE STEPS
"""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.parse
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.bench.pool.load import PoolSizes, StepSource
from headrace.bench.pool.served import ServedPool
from headrace.bench.report import Figures
from headrace.bench.timing import in_turn, median, seconds
from headrace.pool.connect import connect
from headrace.pool.remote import RemotePool

#: Fetches in one round: what is asked is how much flows, not how long the first answer after a pause takes.
FETCHES_A_ROUND = 10


def http(sizes: PoolSizes, folder: Path) -> Figures:
    """`http_vs_json`: steps fetched over HTTP as arrays, against the same steps as JSON.

    One client fetches 64 steps at a time, 8 groups of 8 rollouts, from a `headrace pool serve`, and ends with Steps
    that hold numpy arrays. The other side is `JsonPeer`, a route that pops as many steps from a list and answers with
    what orjson makes of their arrays; its client reads that with orjson and turns the lists into arrays. Each side
    makes ten fetches in a row, in turn. Both clients keep their connection, both servers do their work for every
    request, and neither keeps anything on disk.
    """
    fetches = (sizes.http_rounds + 1) * FETCHES_A_ROUND
    load = StepSource(sizes, rollouts=sizes.rollouts)
    rollouts = ("--channel", f"train:n_rollouts={sizes.rollouts}")
    with ServedPool(*rollouts) as server, JsonPeer(sizes, fetches) as peer, connect(server.address) as pool:
        for steps in load.submits(fetches):
            pool.submit_steps(steps)
        json_client = _JsonClient(peer.address)
        packed_s, json_s = map(
            median,
            in_turn(
                lambda: seconds(lambda: _fetch(pool, sizes), times=FETCHES_A_ROUND),
                lambda: seconds(lambda: json_client.fetch(sizes), times=FETCHES_A_ROUND),
                sizes.http_rounds,
            ),
        )
        json_client.close()
    return Figures(
        {"http_vs_json": json_s / packed_s},
        {
            "http_steps_per_s": sizes.submit / packed_s,
            "http_fetch_ms": packed_s * 1e3,
            "json_steps_per_s": sizes.submit / json_s,
            "json_fetch_ms": json_s * 1e3,
        },
    )


def _fetch(pool: RemotePool, sizes: PoolSizes) -> None:
    batch = pool.fetch_batch(sizes.submit // sizes.rollouts, timeout=0)
    steps = batch.steps if batch is not None else []
    _all_there([(step.prompt_ids, step.rollout_log_probs) for step in steps], sizes)


class _JsonClient:
    def __init__(self, address: str) -> None:
        parts = urllib.parse.urlsplit(address)
        assert parts.hostname
        self._connection = HTTPConnection(parts.hostname, parts.port)

    def fetch(self, sizes: PoolSizes) -> None:
        self._connection.request("GET", f"/fetch?count={sizes.submit}")
        steps: list[dict[str, Any]] = orjson.loads(self._connection.getresponse().read())
        for step in steps:
            step["prompt_ids"] = np.array(step["prompt_ids"], np.int32)
            step["response_ids"] = np.array(step["response_ids"], np.int32)
            step["rollout_log_probs"] = np.array(step["rollout_log_probs"], np.float32)
        _all_there([(step["prompt_ids"], step["rollout_log_probs"]) for step in steps], sizes)

    def close(self) -> None:
        self._connection.close()


def _all_there(arrays: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]], sizes: PoolSizes) -> None:
    tokens = sum([len(prompt) + len(log_probs) for prompt, log_probs in arrays])
    if tokens != sizes.submit * (sizes.prompt + sizes.response):
        raise AssertionError(f"a fetch brought {tokens} tokens in {len(arrays)} steps instead of {sizes.submit} steps")


#: What a step is to a consumer; the rest of its fields are empty here.
FIELDS = (
    "prompt_ids",
    "response_ids",
    "rollout_log_probs",
    "trajectory_uid",
    "prompt_uid",
    "step_index",
    "reward",
    "policy_version",
    "is_last",
)


class JsonPeer:
    """The child process. `address` is where it answers `GET /fetch?count=N`."""

    def __init__(self, sizes: PoolSizes, fetches: int) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            self.address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            shape = [sizes.prompt, sizes.response, fetches * sizes.submit]
            command = [sys.executable, "-m", "headrace.bench.pool.http", str(listener.fileno()), *map(str, shape)]
            self._process = subprocess.Popen(command, pass_fds=[listener.fileno()])

    def __enter__(self) -> JsonPeer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()


def _serve(fd: int, prompt: int, response: int, count: int) -> None:
    steps = StepSource(PoolSizes("peer", prompt=prompt, response=response)).steps(count)

    async def fetch(request: Request) -> Response:
        wanted = int(request.query_params["count"])
        taken, steps[:wanted] = steps[:wanted], []
        found = [{name: getattr(step, name) for name in FIELDS} for step in taken]
        return Response(orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")

    config = uvicorn.Config(
        Starlette(routes=[Route("/fetch", fetch)]), log_level="warning", access_log=False, timeout_keep_alive=600
    )
    with socket.socket(fileno=fd) as listener:
        uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
