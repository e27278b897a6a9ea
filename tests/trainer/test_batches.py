"""What the trainer is fed: every trajectory once, whatever became of the leases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.trainer.kit import pool_of

from headrace import DataPool
from headrace.trainer import TrainerConfig
from headrace.trainer.batches import BatchFeed, RetryingPool
from headrace.trainer.checkpoint import LeaseFile
from headrace.trainer.environments import RunRegistration
from headrace.trainer.reporting import RunWatcher
from headrace.trainer.stopping import Outage, StopSignal


@pytest.fixture
def pool() -> DataPool:
    return pool_of([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])


@pytest.fixture
def feed(pool: DataPool, tmp_path: Path) -> Iterator[BatchFeed]:
    given = {"model": tmp_path, "run": tmp_path, "pool": {"batch_size": 1, "prefetch": False}}
    stop = StopSignal()
    patient = RetryingPool(pool, Outage("the pool", print), stop, 300.0)
    config = TrainerConfig.model_validate(given)
    registration = RunRegistration(patient, config, lambda: 0)
    found = BatchFeed(patient, config, LeaseFile(tmp_path), stop=stop, watcher=RunWatcher(), registration=registration)
    yield found
    stop.set("the test")
    found.close()
    patient.close()


def test_a_batch_whose_lease_ran_out_is_not_learned_from_again(feed: BatchFeed, pool: DataPool) -> None:
    first = feed.next()
    assert first is not None
    pool.nack(first.lease_id)  # as when it had run out: its group stands first in line again
    second = feed.next()
    assert second is not None
    assert set(second.trajectories).isdisjoint(first.trajectories)


def test_what_came_again_is_consumed_once_a_checkpoint_holds_it(feed: BatchFeed, pool: DataPool) -> None:
    first = feed.next()
    assert first is not None
    pool.nack(first.lease_id)
    second = feed.next()
    assert second is not None
    assert pool.stats("train")["ledger"]["consumed"] == 0  # a crash now must be able to learn from all of it
    feed.ack({first.lease_id: first.trajectories, second.lease_id: second.trajectories})
    assert pool.stats("train")["ledger"]["consumed"] == len(first.trajectories) + len(second.trajectories)


def test_a_batch_that_is_given_back_may_come_again(feed: BatchFeed, pool: DataPool) -> None:
    first = feed.next()
    assert first is not None
    feed.recover({})  # which gives back whatever no checkpoint learned from
    second = feed.next()
    assert second is not None
    assert second.trajectories == first.trajectories
