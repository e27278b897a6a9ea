"""A trajectory that failed: its steps are gone with a reason, its group goes on without it, and nothing of it is late
by surprise."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pool.kit import Clock, drain, events, fetched, group, ledger, step, trajectory

from headrace import DataPool
from headrace.data.errors import InvalidInput
from headrace.pool.errors import Conflict, Gone
from headrace.pool.operation import Completion


def failed(pool: Any, **filters: Any) -> list[tuple[str, str, int]]:
    rows = pool.list_trajectories(state="failed", **filters)["items"]
    return [(row["trajectory_uid"], row["reason"], row["steps"]) for row in rows]


def test_its_steps_are_dropped_with_the_reason(pool: Any) -> None:
    pool.submit_steps([step("a", 0, "p"), step("a", 1, "p"), step("b", 0, "p")])
    assert pool.fail("a", "crashed: exit code 3") == Completion("ok", 2)
    assert ledger(pool) == {"submitted": 3, "queued": 1, "failed": 2}
    assert events(pool, "failed") == [
        {"trajectory": "a", "group": "p", "steps": 2, "reason": "crashed: exit code 3", "quarantined": False}
    ]
    assert pool.stats("train")["counts"]["failed"] == 1


def test_another_rollout_takes_its_place_in_the_group(pool: Any) -> None:
    pool.configure(n_rollouts=3)
    pool.submit_steps([*group("p", 2, 2), step("p/2", 0, "p")])
    pool.fail("p/2", "hung")
    assert pool.fetch_batch(1, timeout=0) is None
    pool.submit_steps(trajectory("p/2-again", 2, "p"))
    (found,) = fetched(pool).groups
    assert [one.uid for one in found.trajectories] == ["p/0", "p/1", "p/2-again"]
    assert ledger(pool) == {"submitted": 7, "consumed": 6, "failed": 1}


def test_told_again_it_answers_the_same_and_changes_nothing(pool: Any) -> None:
    pool.open("a", "p")
    pool.submit_step(step("a", 0, "p"))
    assert pool.fail("a", "crashed") == Completion("ok", 1)
    assert pool.fail("a", "crashed") == Completion("ok", 1)
    assert pool.fail("a", "something else") == Completion("ok", 1)
    assert failed(pool) == [("a", "crashed", 1)]
    assert pool.stats("train")["counts"]["failed"] == 1


def test_one_that_never_called_the_model_fails_too(pool: Any) -> None:
    pool.open("a", "p", n_rollouts=2)
    assert pool.fail("a", "no calls") == Completion("ok", 0)
    assert failed(pool) == [("a", "no calls", 0)]
    assert pool.list_groups()["items"] == []


def test_what_still_comes_of_it_is_late_and_its_name_is_taken(pool: Any) -> None:
    pool.submit_steps([step("a", 0, "p"), step("b", 0, "p")])
    pool.fail("a", "crashed")
    assert pool.submit_step(step("a", 0, "p")).duplicates == 1
    assert pool.submit_step(step("a", 1, "p", last=True)).late == 1
    assert pool.reward("a", 1.0) == "late"
    assert pool.complete("a").status == "late"
    with pytest.raises(Conflict, match="failed"):
        pool.open("a", "p")
    with pytest.raises(Gone, match=r"'a' failed \(crashed\)"):
        pool.trajectory("a")
    assert ledger(pool) == {"submitted": 3, "queued": 1, "failed": 1, "late": 1}


def test_complete_handed_out_and_unknown_ones_do_not_fail(pool: Any) -> None:
    pool.submit_steps([*trajectory("done", 2), *trajectory("consumed"), step("running", 0, "leased")])
    assert pool.fail("done", "too late") == Completion("late", 2)
    assert pool.fail("never", "heard of").status == "unknown"
    pool.submit_steps([*trajectory("other", 1, "leased")])
    fetched(pool, 1)  # done
    fetched(pool, 1)  # consumed
    fetched(pool, 1, lease_s=100)
    assert pool.fail("consumed", "too late") == Completion("late", 1)
    assert pool.fail("running", "left behind").status == "late"
    assert failed(pool) == []


def test_a_reward_that_failed_for_good_quarantines_a_complete_trajectory(pool: Any) -> None:
    pool.configure(n_rollouts=2, require_reward=True)
    pool.submit_steps([*trajectory("a", 2, "p"), *trajectory("b", 1, "p", reward=1.0)])
    assert pool.fail("a", "reward: timeout", quarantine=True) == Completion("ok", 2)
    assert ledger(pool) == {"submitted": 3, "queued": 1, "quarantined": 2}
    assert failed(pool) == [("a", "reward: timeout", 2)]
    pool.submit_steps(trajectory("c", 1, "p", reward=0.5))
    assert [one.uid for one in fetched(pool).groups[0].trajectories] == ["b", "c"]


def test_a_reward_that_came_meanwhile_keeps_a_trajectory_from_failing(pool: Any) -> None:
    pool.submit_steps(trajectory("a", 1))
    pool.reward("a", 1.0, source="person")
    assert pool.fail("a", "reward: timeout", quarantine=True) == Completion("late", 1)
    assert drain(pool) == ["a"]


def test_a_group_without_its_failed_rollout_times_out_as_configured() -> None:
    clock = Clock()
    with DataPool(clock=clock, defaults={"n_rollouts": 2, "group_timeout_s": 10.0, "on_timeout": "partial"}) as pool:
        pool.submit_steps([*trajectory("a", 1, "p"), step("b", 0, "p")])
        clock.forward(8)
        pool.fail("b", "crashed")
        clock.forward(8)  # the failure was news: its replacement has the whole time
        assert pool.fetch_batch(1, timeout=0) is None
        clock.forward(3)
        (found,) = fetched(pool).groups
        assert (found.partial, [one.uid for one in found.trajectories]) == (True, ["a"])
        assert ledger(pool) == {"submitted": 2, "consumed": 1, "failed": 1}
        # the replacement that comes after the group went is late, and begins no other group
        assert pool.submit_step(step("b2", 0, "p", last=True)).late == 1


def test_single_steps_that_are_out_leave_their_lease(pool: Any) -> None:
    pool.submit_steps([step("a", 0, "p"), step("a", 1, "p"), step("b", 0, "p")])
    used = fetched(pool, 1, unit="step")
    lease = fetched(pool, 2, unit="step", lease_s=100)
    assert pool.fail("a", "crashed") == Completion("ok", 2)
    assert ledger(pool) == {"submitted": 3, "consumed": 1, "leased": 1, "failed": 1}
    lease.ack()
    assert ledger(pool) == {"submitted": 3, "consumed": 2, "failed": 1}
    assert len(used) == 1


def test_failures_are_listed_in_their_order_page_by_page(pool: Any) -> None:
    for at in range(5):
        pool.open(f"t{at}", f"p{at % 2}")
        pool.fail(f"t{at}", f"reason {at}")
    page = pool.list_trajectories(state="failed", limit=2)
    rest = pool.list_trajectories(state="failed", limit=10, cursor=page["next"])
    assert [row["trajectory_uid"] for row in page["items"] + rest["items"]] == [f"t{at}" for at in range(5)]
    assert failed(pool, prompt_uid="p1") == [("t1", "reason 1", 0), ("t3", "reason 3", 0)]
    assert failed(pool, trajectory_uid="t4") == [("t4", "reason 4", 0)]
    assert pool.list_trajectories()["items"] == []


@pytest.mark.parametrize("reason", ["", "x" * 2001, 3])
def test_a_reason_is_a_text_of_some_length(pool: Any, reason: Any) -> None:
    pool.open("a", "p")
    with pytest.raises(InvalidInput, match="reason"):
        pool.fail("a", reason)
    assert failed(pool) == []


def test_what_is_forgotten_tells_no_reason(pool: Any) -> None:
    pool.open("a", "p")
    pool.fail("a", "a name that must go")
    assert pool.forget("a")
    assert failed(pool) == []
    with pytest.raises(Gone, match="forgotten"):
        pool.trajectory("a")


def test_failures_are_remembered_as_long_as_tombstones_over_restarts_and_snapshots(tmp_path: Any) -> None:
    options: dict[str, Any] = {"journal": tmp_path / "pool", "defaults": {"tombstones": 3}}
    with DataPool(**options) as pool:
        for at in range(5):
            pool.submit_step(step(f"t{at}"))
            pool.fail(f"t{at}", f"reason {at}", quarantine=at == 3)
        kept = [("t2", "reason 2", 1), ("t3", "reason 3", 1), ("t4", "reason 4", 1)]
        assert failed(pool) == kept
    with DataPool(**options) as pool:
        assert failed(pool) == kept
        pool.compact()
    with DataPool(**options) as pool:
        assert failed(pool) == kept
        assert pool.fail("t4", "again") == Completion("ok", 1)
        assert ledger(pool) == {"submitted": 5, "failed": 4, "quarantined": 1}
