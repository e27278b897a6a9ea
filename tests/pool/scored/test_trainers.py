"""A channel that environments feed: who fetches from it is their trainer, moves their step, and tells them its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pool.scored.kit import environment, joined, post, scored_stats, started, trainer

from headrace import DataPool
from headrace.pool.calls import BlockingPool
from headrace.pool.scored.types import MAX_SEQUENCES


def test_who_fetches_lets_environments_in(pool: BlockingPool) -> None:
    pool.desk_serve("train")
    assert pool.desk_register_env(environment()) is None
    assert pool.fetch_batch(2, timeout=0) is None
    found = pool.desk_register_env(environment())
    assert found is not None
    assert (found.starting_step, found.num_steps, found.misfit) == (0, -1, "")
    info = pool.desk_info()
    assert (info.started, info.by_fetch, info.batch_size) == (True, True, 4)  # two groups of the two that it sends


@pytest.mark.parametrize(
    ("batch_size", "n_rollouts", "held"),
    [
        (10**9, 8, (MAX_SEQUENCES, 10**9)),
        (2**31, None, (MAX_SEQUENCES, MAX_SEQUENCES)),
        (2**53, 2**53, (MAX_SEQUENCES, MAX_SEQUENCES)),
    ],
)
def test_whoever_fetches_more_than_there_will_be_is_read_back_as_a_trainer(
    tmp_path: Path, batch_size: int, n_rollouts: int | None, held: tuple[int, int]
) -> None:
    with DataPool(tmp_path, durability="os") as pool:
        pool.desk_serve("train")
        assert pool.fetch_batch(batch_size, n_rollouts=n_rollouts, timeout=0) is None
    with DataPool(tmp_path, durability="os") as pool:
        found = pool.desk_info().registration
        assert found is not None
        assert (found.batch_size, found.batch_groups) == held


def test_another_channel_is_nobodys_training(pool: BlockingPool) -> None:
    pool.desk_serve("train")
    assert pool.fetch_batch(1, channel="val", timeout=0) is None
    assert (pool.desk_info().registration, pool.desk_register_env(environment())) == (None, None)


def test_a_fetched_batch_is_a_step_unless_it_comes_back(pool: BlockingPool) -> None:
    pool.desk_serve("train")
    for name in range(3):
        post(pool, name)
    first = pool.fetch_batch(1, timeout=0, lease_s=100)
    second = pool.fetch_batch(1, timeout=0, lease_s=100)
    assert first is not None
    assert second is not None
    assert pool.desk_status().step == 2
    second.nack()
    assert pool.desk_status().step == 1
    first.ack()
    assert pool.fetch_batch(2, timeout=0) is not None  # without a lease it is consumed at once
    assert pool.desk_status().step == 2


def test_a_trainer_that_registers_takes_over_from_one_that_only_fetched(pool: BlockingPool) -> None:
    pool.desk_serve("train")
    post(pool, 1)
    assert pool.fetch_batch(1, timeout=0) is not None
    assert pool.desk_register(trainer(starting_step=7, num_steps=9)).warning is None
    assert (pool.desk_status().step, pool.desk_info().by_fetch) == (7, False)


def test_a_restart_counts_from_its_own_step(pool: BlockingPool) -> None:
    """A resumed run has learned from fewer batches than were handed out; what is out counts no longer."""
    pool.desk_serve("train")
    pool.desk_register(trainer())
    for name in range(2):
        post(pool, name)
    batch = pool.fetch_batch(2, timeout=0, lease_s=100)
    assert batch is not None
    pool.desk_register(trainer(starting_step=5), restart=True)
    assert pool.desk_status().step == 5
    batch.nack()
    assert pool.desk_status().step == 5


def test_groups_of_any_size_serve_a_trainer_that_takes_whole_groups(pool: BlockingPool) -> None:
    pool.desk_serve("train")
    pool.desk_register(trainer(batch_size=2, batch_groups=2))
    assert pool.fetch_batch(2, timeout=0) is None
    env = joined(pool, group_size=8)
    assert pool.desk_info().batch_size == 16
    assert not post(pool, 1, env, sequences=8).misfit  # more than batch_size, were it exact
    post(pool, 2, sequences=3)
    batch = pool.fetch_batch(2, timeout=0)
    assert batch is not None
    assert sorted(len(group.trajectories) for group in batch.groups) == [3, 8]
    assert scored_stats(pool)["dead_letters"] == {}


def test_environments_are_told_of_the_end_and_of_the_next_beginning(pool: BlockingPool) -> None:
    pool.desk_serve("train")
    first = pool.desk_register(trainer())
    pool.fetch_batch(1, timeout=0)
    env = joined(pool)
    assert not pool.desk_env_status(env).ended
    pool.desk_end(first.uuid)
    assert pool.desk_env_status(env).ended
    assert pool.desk_register_env(environment()) is None  # waits for the next trainer
    pool.desk_register(trainer())
    pool.fetch_batch(1, timeout=0)
    pool.desk_end(first.uuid)  # too late: another has registered
    assert not pool.desk_env_status(env).ended
    assert pool.desk_register_env(environment()) is not None


def test_steps_and_the_end_survive(tmp_path: Path) -> None:
    with DataPool(tmp_path / "pool") as pool:
        pool.desk_serve("train")
        uuid = pool.desk_register(trainer()).uuid
        for name in range(3):
            post(pool, name)
        assert pool.fetch_batch(1, timeout=0, lease_s=1000) is not None
        leased = pool.fetch_batch(1, timeout=0, lease_s=1000)
        assert leased is not None
        env = joined(pool)
    for compact in (False, True):
        with DataPool(tmp_path / "pool") as pool:
            assert pool.desk_status().step == 2
            if compact:
                pool.compact()
    with DataPool(tmp_path / "pool") as pool:
        pool.nack(str(leased.lease_id))
        assert pool.desk_status().step == 1
        pool.desk_end(uuid)
    with DataPool(tmp_path / "pool") as pool:
        pool.compact()
    with DataPool(tmp_path / "pool") as pool:
        assert (pool.desk_env_status(env).ended, pool.desk_status().step) == (True, 1)


def test_an_exact_trainer_is_served_as_before(pool: BlockingPool) -> None:
    started(pool, batch_size=4)
    pool.desk_serve("train")
    for name in range(2):
        post(pool, name)
    assert pool.desk_batch() is not None
    assert pool.desk_status().step == 1
