"""`http_vs_json`: steps fetched over HTTP as arrays, against the same steps as JSON.

One client fetches 64 steps at a time, 8 groups of 8 rollouts, from a `headrace pool serve`, and ends with Steps that
hold numpy arrays. The other side is `json_peer`, a route that pops as many steps from a list and answers with what
orjson makes of their arrays; its client reads that with orjson and turns the lists into arrays. Each side makes ten
fetches in a row, in turn. Both clients keep their connection, both servers do their work for every request, and neither
keeps anything on disk.
"""

from __future__ import annotations

import http.client
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from headrace.bench.pool.json_peer import Peer
from headrace.bench.pool.load import Load
from headrace.bench.pool.served import Served
from headrace.bench.pool.sizes import Sizes
from headrace.bench.report import Part
from headrace.bench.timing import in_turn, median, seconds
from headrace.pool.connect import connect
from headrace.pool.remote import RemotePool

#: Fetches in one turn: what is asked is how much flows, not how long the first answer after a pause takes.
A_TURN = 10


def measure(sizes: Sizes, folder: Path) -> Part:
    fetches = (sizes.http_rounds + 1) * A_TURN
    load = Load(sizes, rollouts=sizes.rollouts)
    rollouts = ("--channel", f"train:n_rollouts={sizes.rollouts}")
    with Served(*rollouts) as server, Peer(sizes, fetches) as peer, connect(server.address) as pool:
        for steps in load.submits(fetches):
            pool.submit_steps(steps)
        json_client = _JsonClient(peer.address)
        packed_s, json_s = map(
            median,
            in_turn(
                lambda: seconds(lambda: _fetch(pool, sizes), times=A_TURN),
                lambda: seconds(lambda: json_client.fetch(sizes), times=A_TURN),
                sizes.http_rounds,
            ),
        )
        json_client.close()
    return Part(
        {"http_vs_json": json_s / packed_s},
        {
            "http_steps_per_s": sizes.submit / packed_s,
            "http_fetch_ms": packed_s * 1e3,
            "json_steps_per_s": sizes.submit / json_s,
            "json_fetch_ms": json_s * 1e3,
        },
    )


def _fetch(pool: RemotePool, sizes: Sizes) -> None:
    batch = pool.fetch_batch(sizes.submit // sizes.rollouts, timeout=0)
    steps = batch.steps if batch is not None else []
    _all_there([(step.prompt_ids, step.rollout_log_probs) for step in steps], sizes)


class _JsonClient:
    def __init__(self, address: str) -> None:
        parts = urllib.parse.urlsplit(address)
        assert parts.hostname
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port)

    def fetch(self, sizes: Sizes) -> None:
        self._connection.request("GET", f"/fetch?count={sizes.submit}")
        steps: list[dict[str, Any]] = orjson.loads(self._connection.getresponse().read())
        for step in steps:
            step["prompt_ids"] = np.array(step["prompt_ids"], np.int32)
            step["response_ids"] = np.array(step["response_ids"], np.int32)
            step["rollout_log_probs"] = np.array(step["rollout_log_probs"], np.float32)
        _all_there([(step["prompt_ids"], step["rollout_log_probs"]) for step in steps], sizes)

    def close(self) -> None:
        self._connection.close()


def _all_there(arrays: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]], sizes: Sizes) -> None:
    tokens = sum([len(prompt) + len(log_probs) for prompt, log_probs in arrays])
    if tokens != sizes.submit * (sizes.prompt + sizes.response):
        raise AssertionError(f"a fetch brought {tokens} tokens in {len(arrays)} steps instead of {sizes.submit} steps")
