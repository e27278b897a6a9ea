"""What the trainer is fed: every trajectory once, whatever became of the leases."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


class LosesAnswers:
    """A pool that hands a batch out to a trainer which is gone when the answer comes."""

    def __init__(self, pool: DataPool) -> None:
        self._pool = pool

    def fetch_batch(self, *args: Any, **kwargs: Any) -> None:
        assert self._pool.fetch_batch(*args, **kwargs) is not None
        raise RuntimeError("killed")


class HasNothingYet:
    """A pool that has nothing when it is asked first; `first_answer_at` is when it said so. Its batches are as many
    seconds on their way, by their deadline."""

    def __init__(self, pool: DataPool, on_its_way_s: float = 0.0) -> None:
        self._pool = pool
        self._on_its_way_s = on_its_way_s
        self.first_answer_at = 0.0

    def fetch_batch(self, *args: Any, **kwargs: Any) -> Any:
        if self.first_answer_at:
            batch: Any = self._pool.fetch_batch(*args, **kwargs)
            batch.deadline -= self._on_its_way_s
            return batch
        self.first_answer_at = time.monotonic()
        return None

    def stats(self, channel: str) -> Any:
        return self._pool.stats(channel)


class EndsBetween:
    """A pool whose last groups come, and which is shut down, just after it was asked in vain and before it is asked how
    far they are."""

    def __init__(self, pool: DataPool) -> None:
        self._pool = pool

    def fetch_batch(self, *args: Any, **kwargs: Any) -> Any:
        return self._pool.fetch_batch(*args, **kwargs) if self._pool.stats("train")["closed"] else None

    def stats(self, channel: str) -> Any:
        self._pool.shutdown(channel)
        return self._pool.stats(channel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


@pytest.fixture
def feed(pool: DataPool, tmp_path: Path) -> Iterator[BatchFeed]:
    with fed_by(pool, tmp_path) as found:
        yield found


@contextmanager
def fed_by(pool: Any, tmp_path: Path, repeats: Iterable[str] = (), batch_size: int = 1) -> Iterator[BatchFeed]:
    """A feed of a run in this folder, whose last checkpoint has these repeats."""
    given = {"model": tmp_path, "run": tmp_path, "pool": {"batch_size": batch_size, "prefetch": False}}
    stop = StopSignal()
    patient = RetryingPool(pool, Outage("the pool", print), stop, 300.0)
    config = TrainerConfig.model_validate(given)
    registration = RunRegistration(patient, config, lambda: 0)
    found = BatchFeed(
        *(patient, config, LeaseFile(tmp_path), repeats),
        stop=stop,
        watcher=RunWatcher(),
        registration=registration,
    )
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


def lose(feed: BatchFeed, pool: DataPool) -> list[str]:
    """The trajectories of a batch that is learned from and whose lease runs out before it is acknowledged."""
    batch = feed.next()
    assert batch is not None
    pool.nack(batch.lease_id)
    feed.ack({batch.lease_id: batch.trajectories})
    return batch.trajectories


def test_what_comes_again_is_remembered_until_it_is_acknowledged(pool: DataPool, tmp_path: Path) -> None:
    with fed_by(pool, tmp_path) as killed:
        lost = lose(killed, pool)
        assert killed.next() is not None  # before which what was lost came again
        in_checkpoint = set(killed.repeats)
    with fed_by(pool, tmp_path, in_checkpoint) as resumed:
        resumed.recover({})
        batch = resumed.next()
        assert batch is not None
        assert set(batch.trajectories).isdisjoint(lost)
        assert resumed.repeats == set(lost)
        resumed.ack({batch.lease_id: batch.trajectories})
        assert resumed.repeats == set()


def test_a_lost_batch_leaves_what_it_passed_over_to_come_again(pool: DataPool, tmp_path: Path) -> None:
    with fed_by(pool, tmp_path) as before:
        lost = lose(before, pool)
    with fed_by(pool, tmp_path, lost, batch_size=2) as feed:
        fresh = lose(feed, pool)  # beside which stands what was lost
        assert set(fresh).isdisjoint(lost)
        assert feed.repeats == {*lost, *fresh}


def test_a_batch_that_is_given_back_may_come_again(feed: BatchFeed, pool: DataPool) -> None:
    first = feed.next()
    assert first is not None
    feed.recover({})  # which gives back whatever no checkpoint learned from
    second = feed.next()
    assert second is not None
    assert second.trajectories == first.trajectories


def test_a_batch_whose_answer_nobody_lived_to_see_is_given_back(pool: DataPool, tmp_path: Path) -> None:
    with fed_by(LosesAnswers(pool), tmp_path) as killed, pytest.raises(RuntimeError, match="killed"):
        killed.next()
    assert pool.stats("train")["ledger"]["leased"] == 2
    with fed_by(pool, tmp_path) as resumed:
        resumed.recover({})
        assert pool.stats("train")["ledger"]["leased"] == 0
        assert LeaseFile(tmp_path).read() == ([], "")
        assert resumed.next() is not None


def test_a_trainer_is_starved_from_when_it_asked_in_vain(feed: BatchFeed, pool: DataPool, tmp_path: Path) -> None:
    there = feed.next()
    assert there is not None
    assert there.starved == (0.0, 0.0)
    empty = HasNothingYet(pool)
    with fed_by(empty, tmp_path) as other:
        later = other.next()
    assert later is not None
    assert 0 < later.starved[0] <= empty.first_answer_at < later.starved[1]


def test_a_batchs_way_from_the_pool_is_no_starvation(pool: DataPool, tmp_path: Path) -> None:
    slow = HasNothingYet(pool, on_its_way_s=3600)
    with fed_by(slow, tmp_path) as feed:
        found = feed.next()
    assert found is not None
    assert found.starved[1] < slow.first_answer_at < found.converted[0]


def test_what_came_just_before_the_end_is_learned_from(pool: DataPool, tmp_path: Path) -> None:
    with fed_by(EndsBetween(pool), tmp_path, batch_size=4) as feed:
        last = feed.next()
        assert last is not None
        assert last.examples.groups == 3  # all that there were: a channel that has ended hands out the rest
        feed.ack({last.lease_id: last.trajectories})
        assert feed.next() is None
    assert pool.stats("train")["ledger"]["consumed"] == len(last.trajectories)
