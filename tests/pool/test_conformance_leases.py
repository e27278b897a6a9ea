"""Promise 4: what is leased is consumed by an ack and by nothing else; what is lost comes back in its old place."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pool.kit import SOON, Threads, drain, events, fetched, group, ledger, prompts, until_blocked

from headrace.pool.errors import LeaseLost


def ready(pool: Any, *names: str) -> None:
    pool.submit_steps([one for name in names for one in group(name)])


def test_a_leased_batch_is_consumed_when_it_is_acknowledged(pool: Any) -> None:
    ready(pool, "a", "b", "c")
    batch = fetched(pool, 2, lease_s=600)
    assert batch.lease_id
    assert batch.deadline > 600
    assert ledger(pool) == {"submitted": 3, "leased": 2, "queued": 1}
    assert pool.stats("train")["leases"] == 1
    batch.ack()
    assert ledger(pool) == {"submitted": 3, "consumed": 2, "queued": 1}
    assert pool.stats("train")["leases"] == 0


def test_an_ack_sent_again_is_fine(pool: Any) -> None:
    ready(pool, "a")
    batch = fetched(pool, lease_s=600)
    batch.ack()
    batch.ack()
    pool.ack(batch.lease_id)
    assert ledger(pool) == {"submitted": 1, "consumed": 1}


def test_a_nack_sent_again_is_fine_whoever_has_the_groups_by_then(pool: Any) -> None:
    ready(pool, "a")
    batch = fetched(pool, lease_s=600)
    batch.nack()
    batch.nack()
    again = fetched(pool, lease_s=600)
    pool.nack(batch.lease_id)
    assert ledger(pool) == {"submitted": 1, "leased": 1}
    again.ack()
    for end in (batch.ack, again.nack):
        with pytest.raises(LeaseLost, match="another consumer"):
            end()


def test_a_trainer_that_never_acknowledges_gets_the_same_groups_again_in_place(pool: Any) -> None:
    pool.configure(n_rollouts=2)
    for name in "abcd":
        pool.submit_steps(group(name, 2))
    lost = fetched(pool, 2, lease_s=0.05)
    assert prompts(lost) == ["a", "b"]
    # Waits for four groups, which are there only once the lease has run out.
    again = fetched(pool, 4, lease_s=600)
    assert prompts(again) == ["a", "b", "c", "d"]
    assert [found.deliveries for found in again.groups] == [2, 2, 1, 1]
    assert again.steps[:4] == lost.steps
    assert [event["reason"] for event in events(pool, "redelivery")] == ["expired"]
    assert pool.stats("train")["counts"]["redelivered"] == 2
    for end in (lost.ack, lost.nack, lambda: lost.extend(5)):
        with pytest.raises(LeaseLost, match="another consumer"):
            end()
    again.ack()
    assert ledger(pool) == {"submitted": 8, "consumed": 8}


def test_a_nack_gives_back_at_once_in_the_old_place(pool: Any) -> None:
    ready(pool, "a", "b", "c")
    first, second = fetched(pool, lease_s=600), fetched(pool, lease_s=600)
    second.nack()
    first.nack()
    with pytest.raises(LeaseLost):
        first.ack()
    again = fetched(pool, 3)
    assert prompts(again) == ["a", "b", "c"]
    assert [found.deliveries for found in again.groups] == [2, 2, 1]


def test_an_extended_lease_ends_when_it_was_last_told_to(pool: Any) -> None:
    ready(pool, "a", "b")
    kept, lost = fetched(pool, lease_s=600), fetched(pool, lease_s=600)
    assert kept.extend(6000) > kept.deadline
    assert lost.extend(0.05) < lost.deadline
    assert prompts(fetched(pool)) == prompts(lost) == ["b"]
    kept.ack()
    assert ledger(pool) == {"submitted": 2, "consumed": 2}


def test_a_fetch_that_already_waits_gets_what_another_trainer_loses(pool: Any, threads: Threads) -> None:
    """The lease that it is to inherit did not exist when it began to wait."""
    waiting = threads.submit(pool.fetch_batch, 2)
    until_blocked(pool)
    ready(pool, "a")
    assert prompts(fetched(pool, lease_s=600)) == ["a"]
    ready(pool, "b")
    assert prompts(fetched(pool, lease_s=0.05)) == ["b"]
    ready(pool, "c")
    batch = waiting.result(SOON)
    assert prompts(batch) == ["b", "c"]
    assert [found.deliveries for found in batch.groups] == [2, 1]


def test_a_fetch_that_already_waits_hears_of_a_shortened_lease(pool: Any, threads: Threads) -> None:
    ready(pool, "a")
    batch = fetched(pool, lease_s=600)
    waiting = threads.submit(pool.fetch_batch, 1)
    until_blocked(pool)
    batch.extend(0.05)
    assert prompts(waiting.result(SOON)) == ["a"]


def test_leases_are_apart(pool: Any) -> None:
    ready(pool, "a", "b")
    first, second = fetched(pool, lease_s=600), fetched(pool, lease_s=600)
    assert first.lease_id != second.lease_id
    second.ack()
    first.nack()
    assert drain(pool) == ["a"]


def test_a_lease_of_another_channel_or_of_nobody_is_unknown(pool: Any) -> None:
    ready(pool, "a")
    batch = fetched(pool, lease_s=600)
    for call in (lambda: pool.ack("nobody"), lambda: pool.ack(batch.lease_id, channel="eval")):
        with pytest.raises(LeaseLost, match="no lease"):
            call()
    batch.ack()


def test_a_group_that_comes_back_takes_its_missing_trajectories_again(pool: Any) -> None:
    pool.configure(n_rollouts=3)
    pool.submit_steps(group("p", 2))
    batch = fetched(pool, n_rollouts=2, lease_s=600)
    batch.nack()
    pool.submit_steps(group("p", 3)[2:])
    assert [one.uid for one in fetched(pool).groups[0].trajectories] == ["p/0", "p/1", "p/2"]


def test_leased_groups_are_not_handed_out_in_any_order_or_unit(pool: Any) -> None:
    ready(pool, "a")
    fetched(pool, lease_s=600)
    for options in ({}, {"order": "latest"}, {"order": "mixed"}, {"unit": "step"}, {"n_rollouts": 1}):
        assert pool.fetch_batch(1, timeout=0, **options) is None
