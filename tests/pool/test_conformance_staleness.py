"""Promise 7: staleness is checked at submit, at fetch and when the version moves; a group is as old as its oldest."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pool.kit import drain, events, fetched, group, ledger, prompts, step

from headrace.data import InvalidInput


def versioned(pool: Any, **groups: int) -> None:
    pool.submit_steps([one for name, version in groups.items() for one in group(name, policy_version=version)])


def test_a_step_that_is_stale_when_it_comes_is_dropped(pool: Any) -> None:
    pool.configure(max_staleness=1)
    pool.set_version(5)
    versioned(pool, old=3, edge=4, new=5)
    assert events(pool, "drop") == [{"group": "old", "steps": 1, "reason": "stale"}]
    assert ledger(pool) == {"submitted": 3, "queued": 2, "stale": 1}
    assert drain(pool) == ["edge", "new"]


def test_groups_that_become_stale_when_the_version_moves_are_dropped(pool: Any) -> None:
    pool.configure(max_staleness=2)
    versioned(pool, a=0, b=1, c=2)
    pool.set_version(2)
    assert ledger(pool) == {"submitted": 3, "queued": 3}
    pool.set_version(3)
    assert ledger(pool) == {"submitted": 3, "queued": 2, "stale": 1}
    pool.set_version(10)
    assert ledger(pool) == {"submitted": 3, "stale": 3}


def test_a_fetch_may_ask_for_fresher_groups(pool: Any) -> None:
    versioned(pool, a=0, b=3, c=4)
    pool.set_version(5)
    assert prompts(fetched(pool, 1, max_staleness=1)) == ["c"]
    assert ledger(pool) == {"submitted": 3, "consumed": 1, "stale": 2}


def test_a_fetch_that_finds_only_stale_groups_finds_nothing(pool: Any) -> None:
    versioned(pool, a=0, b=0)
    pool.set_version(5)
    assert pool.fetch_batch(1, max_staleness=0, timeout=0) is None
    assert ledger(pool) == {"submitted": 2, "stale": 2}


def test_without_a_limit_nothing_is_stale(pool: Any) -> None:
    versioned(pool, a=0)
    pool.set_version(1000)
    assert fetched(pool).groups[0].oldest_version == 0


def test_a_group_is_as_old_as_its_oldest_step(pool: Any) -> None:
    pool.configure(max_staleness=1)
    pool.submit_steps([step("t", 0, policy_version=2), step("t", 1, last=True, policy_version=9)])
    pool.submit_steps(
        [
            step("u", 0, policy_version=9),
            step("u", 1, quarantined="bad", policy_version=0),
            step("u", 2, last=True, policy_version=9),
        ]
    )
    pool.set_version(4)
    assert events(pool, "drop") == [{"group": "t", "steps": 2, "reason": "stale"}]
    assert prompts(fetched(pool)) == ["u"]


def test_an_incomplete_group_can_be_stale_too(pool: Any) -> None:
    pool.configure(max_staleness=0)
    pool.submit_step(step("t"))
    pool.set_version(1)
    assert ledger(pool) == {"submitted": 1, "stale": 1}
    assert pool.submit_step(step("t", 1, last=True)).late == 1


def test_a_leased_group_is_not_taken_away_but_is_stale_when_it_comes_back(pool: Any) -> None:
    pool.configure(max_staleness=1)
    versioned(pool, a=0, b=0)
    kept, lost = fetched(pool, lease_s=600), fetched(pool, lease_s=600)
    pool.set_version(5)
    assert ledger(pool) == {"submitted": 2, "leased": 2}
    lost.nack()
    kept.ack()
    assert ledger(pool) == {"submitted": 2, "consumed": 1, "stale": 1}


def test_a_tightened_limit_holds_for_what_is_there(pool: Any) -> None:
    versioned(pool, a=0, b=5)
    pool.set_version(5)
    pool.configure(max_staleness=2)
    assert drain(pool) == ["b"]


def test_what_was_dropped_as_surplus_does_not_make_a_group_old(pool: Any) -> None:
    pool.configure(n_rollouts=2)
    pool.submit_steps([step("slow", 0, "p", policy_version=0), *group("p", 2, policy_version=5)])
    pool.set_version(5)
    assert fetched(pool).groups[0].oldest_version == 5


def test_what_is_replayed_is_no_staler_than_asked_for(pool: Any) -> None:
    pool.configure(history_size=10, replay_share=0.5)
    versioned(pool, a=0, b=4)
    fetched(pool, 2)
    pool.set_version(5)
    versioned(pool, c=5, d=5, e=5, f=5)
    batch = fetched(pool, 4, order="mixed", max_staleness=2)
    assert prompts(batch) == ["c", "d", "e", "b"]
    pool.configure(max_staleness=0)
    fresh, replayed = fetched(pool, 2, order="mixed").groups
    assert (fresh.prompt_uid, replayed.replayed, replayed.oldest_version) == ("f", True, 5)


def test_versions_only_rise(pool: Any) -> None:
    pool.set_version(5)
    pool.set_version(5)
    with pytest.raises(InvalidInput, match="version 4 is below 5"):
        pool.set_version(4)


def test_channels_have_versions_of_their_own_where_they_were_told(pool: Any) -> None:
    pool.submit_steps(group("a"))
    pool.set_version(3, channel="eval")
    pool.submit_steps(group("b"))
    pool.submit_steps(group("c"), channel="eval")
    assert [found.policy_version for found in fetched(pool, 2).steps] == [0, 0]
    assert fetched(pool, channel="eval").steps[0].policy_version == 3
    assert [event["version"] for event in events(pool, "version")] == [3]
