"""What Ray adds to a pool: an actor that dies and comes back, plain calls on a bare handle, tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from headrace import Step, connect
from headrace.data.errors import InvalidInput
from headrace.pool.errors import NotFound, PoolUnreachable
from headrace.pool.ray import start_pool, stop_pool

pytestmark = pytest.mark.ray


@pytest.fixture
def name(ray_cluster: str) -> Iterator[str]:
    """A name for a pool; whatever runs under it is ended."""
    name = f"pool-{uuid.uuid4().hex[:8]}"
    yield name
    try:
        stop_pool(name)
    except NotFound:
        pass


def step(i: int, **fields: Any) -> Step:
    defaults: dict[str, Any] = {"prompt_ids": [1, 2, 3], "response_ids": [4, 5], "rollout_log_probs": [-0.5, -0.25]}
    return Step(**{**defaults, "trajectory_uid": f"t{i}", "step_index": 0, "is_last": True, **fields})


def test_killed_under_load_it_comes_back_with_everything_acknowledged(name: str, tmp_path: Path) -> None:
    actor = start_pool(name, journal=tmp_path / "journal", durability="os")
    acknowledged: list[str] = []
    half = threading.Event()

    def write(worker: int) -> None:
        pool = connect(f"ray-actor://{name}", retry_s=240)
        for i in range(40):
            uid = f"{worker}-{i}"
            assert pool.submit_steps([step(0, trajectory_uid=uid)]).late == 0
            acknowledged.append(uid)
            if len(acknowledged) > 40:
                half.set()

    writers = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for writer in writers:
        writer.start()
    assert half.wait(120)
    before = ray.get(actor.process_id.remote())
    ray.kill(actor, no_restart=False)
    for writer in writers:
        writer.join(240)
    pool = connect(f"ray-actor://{name}", retry_s=240)
    batch = pool.fetch_batch(160, timeout=0)
    assert batch is not None
    assert sorted(s.trajectory_uid for s in batch.steps) == sorted(acknowledged)
    assert pool.stats()["balanced"]
    assert ray.get(actor.process_id.remote()) != before


def test_a_lease_outlives_the_actor(name: str, tmp_path: Path) -> None:
    actor = start_pool(name, journal=tmp_path / "journal", durability="os")
    pool = connect(f"ray-actor://{name}", retry_s=240)
    pool.submit_steps([step(i) for i in range(3)])
    batch = pool.fetch_batch(2, lease_s=600)
    assert batch is not None
    ray.kill(actor, no_restart=False)
    batch.ack()
    ledger = pool.stats("train")["ledger"]
    assert (ledger["consumed"], ledger["leased"], ledger["queued"]) == (2, 0, 1)


def test_a_bare_handle_answers_plain_calls(name: str) -> None:
    start_pool(name, channels={"train": {"n_rollouts": 2}})
    actor = ray.get_actor(name, namespace="default")
    assert ray.get(actor.submit_step.remote(step(0, prompt_uid="p", is_last=False))).accepted == 1
    receipt = ray.get(actor.submit_steps.remote([step(1, prompt_uid="p").to_dict()], channel="train"))
    assert receipt.accepted == 1
    assert ray.get(actor.fetch_batch.remote(1)) is None, "it polls"
    assert ray.get(actor.complete_trajectory.remote("t0", reward=1.0)) is True
    assert ray.get(actor.complete_trajectory.remote("nobody")) is False
    batch = ray.get(actor.fetch_batch.remote(1, n_rollouts=2, channel="train"))
    assert batch.groups[0].rewards == [1.0, None]
    assert batch.steps[0].response_ids.tolist() == [4, 5]
    assert ray.get(actor.get_statistics.remote())["ledger"]["consumed"] == 2
    ray.get(actor.submit_step.remote(step(7), channel="val"))
    ray.get(actor.shutdown.remote("val"))
    assert len(ray.get(actor.fetch_batch.remote(5, channel="val"))) == 1, "what is left"
    assert ray.get(actor.fetch_batch.remote(5, channel="val")) is None


def test_an_error_in_the_actor_is_raised_here_as_what_it_was(name: str) -> None:
    start_pool(name)
    with pytest.raises(InvalidInput, match="batch_size"):
        connect(f"ray-actor://{name}").fetch_batch(0)


def test_a_name_that_is_taken_and_a_journal_that_is_open_are_refused(name: str, tmp_path: Path) -> None:
    start_pool(name, journal=tmp_path / "journal")
    with pytest.raises(InvalidInput, match="runs in namespace"):
        start_pool(name)
    with pytest.raises(PoolUnreachable, match="is open in process"):
        start_pool(name + "-second", journal=tmp_path / "journal")


def test_nobody_by_that_name(ray_cluster: str) -> None:
    with pytest.raises(NotFound, match="headrace pool start --name nobody"):
        connect("ray-actor://nobody")
    with pytest.raises(InvalidInput, match="ray-actor://NAME"):
        connect("ray-actor://nobody?colour=red")


@pytest.mark.parametrize("address", ["auto", "host:port"])
def test_a_plain_process_of_the_same_user_gets_in(name: str, ray_cluster: str, address: str) -> None:
    start_pool(name)
    where = ray_cluster if address == "host:port" else address
    code = f"from headrace import connect; print(connect('ray-actor://{name}?address={where}').stats()['durability'])"
    env = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "memory", done.stderr
