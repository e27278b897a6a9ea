"""A reward worker as a named Ray actor: asked by a gateway, scoring a pool by itself, back after its death."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from tests.gateway.kit import running_gateway, until
from tests.pool.servers import serving as serving_pool
from tests.rewards.recorded import record

from headrace import DataPool
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.net.ray_cluster import ActorAddress
from headrace.net.ray_placement import Placement
from headrace.rewards.ray import RayRewardWorker, WatchedPool, start_reward_worker, stop_reward_worker
from headrace.rewards.sample import RewardFailure, Sample, Score
from headrace.tokens import load_renderer

pytestmark = pytest.mark.ray

PATIENCE_S = 240
NO_SERVER = "http://127.0.0.1:9"
FUNCTION = """
def length(sample):
    return {"score": None if sample.text == "none" else len(sample.text), "truth": sample.ground_truth}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("reward")
    (found / "length.py").write_text(FUNCTION)
    return found


CONFIG: dict[str, Any] = {"functions": ["length.py:length"], "ground_truth": "solution", "retries": 0}


@pytest.fixture(scope="module")
def pool() -> Iterator[DataPool]:
    with DataPool() as found:
        yield found


@pytest.fixture(scope="module")
def actor(ray_cluster: str, base: Path, folder: Path, pool: DataPool) -> Iterator[ActorAddress]:
    """An actor that scores a pool over HTTP, and whatever it is asked."""
    where = ActorAddress("reward_loop_worker", "rewards", ray_cluster)
    with serving_pool(pool) as address:
        start_reward_worker(
            where, CONFIG, base, watched=WatchedPool(address, ("train",), str(folder)), placement=Placement(num_cpus=0)
        )
        yield where
        assert stop_reward_worker(where)
    assert not stop_reward_worker(where)


async def test_samples_are_scored_by_the_actor_with_its_own_column_of_truth(actor: ActorAddress) -> None:
    worker = RayRewardWorker(actor)
    row = {"solution": "4"}
    samples = [
        Sample(text="four", metadata=row),
        Sample(text="four", ground_truth="of another column", metadata={"answer": "4"}),
        Sample(text="none", metadata=row),
    ]
    good, without, bad = await worker.score(samples)
    assert good == Score(4.0, {"length": 4.0}, {"length.truth": "4"})
    assert isinstance(without, RewardFailure)
    assert "no column 'solution'" in without.detail
    assert isinstance(bad, RewardFailure)
    assert (bad.reason, bad.source) == ("none", "length")
    await worker.aclose()


def test_a_gateway_asks_the_actor_by_its_name(actor: ActorAddress, folder: Path) -> None:
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "abc"}]
    body = {"messages": messages, "dataset_fields": {"solution": 1}}
    nobody = str(ActorAddress("nobody", actor.namespace, actor.cluster))
    for name, status in ((str(actor), 200), (nobody, 503)):
        with (
            DataPool() as own,
            running_gateway(own, NO_SERVER, folder, until_ready=False, reward_worker_name=name) as gateway,
        ):
            answer = gateway.post("/compute_reward", body)
        assert answer.status_code == status, answer.text
        if status == 200:
            assert answer.json()["reward_score"] == 3.0
            assert answer.json()["reward_extra_info"]["length.truth"] == 1
        else:
            assert answer.json()["code"] == "reward_unavailable"
            assert "no actor 'nobody'" in answer.json()["detail"]


def test_the_actor_scores_a_pool_and_goes_on_after_its_death(actor: ActorAddress, folder: Path, pool: DataPool) -> None:
    renderer = load_renderer(folder)
    record(pool, renderer, "first", [("q", "abc")], row={"solution": 1})
    batch = pool.fetch_batch(1, timeout=PATIENCE_S)
    assert batch is not None
    assert batch.groups[0].rewards == [3.0]
    handle = actor.handle()
    assert handle is not None
    until(lambda: ray.get(handle.state.remote())["loop"]["scored"] == 1)
    killed = ray.get(handle.state.remote())["process_id"]
    os.kill(killed, signal.SIGKILL)
    record(pool, renderer, "second", [("q", "abcde")], row={"solution": 1})
    batch = pool.fetch_batch(1, timeout=PATIENCE_S)
    assert batch is not None
    assert batch.groups[0].rewards == [5.0]
    assert ray.get(handle.state.remote())["process_id"] != killed


def test_an_actor_that_runs_or_cannot_start_is_said(actor: ActorAddress, base: Path) -> None:
    with pytest.raises(InvalidInput, match="runs in namespace 'rewards' already"):
        start_reward_worker(actor, CONFIG, base)
    broken = {"functions": ["missing.py:score"]}
    where = ActorAddress("broken", actor.namespace, actor.cluster)
    with pytest.raises(HeadraceError, match=r"'broken' did not start: .*missing\.py"):
        start_reward_worker(where, broken, base, placement=Placement(num_cpus=0))


def test_the_address_of_an_actor_is_read_back() -> None:
    for where in (ActorAddress("a b/c", "space", "10.0.0.1:6379"), ActorAddress("plain")):
        assert ActorAddress.read(str(where)) == where
    assert str(ActorAddress("plain")) == "ray-actor://plain?namespace=default"
    for wrong in ("http://x", "ray-actor://", "ray-actor://x?port=1"):
        with pytest.raises(InvalidInput, match="an actor is ray-actor"):
            ActorAddress.read(wrong)
