"""Channels are many: a call looks at its own, finds a trajectory wherever it is, and their number is bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.pool.journal.kit import check_rules, one

from headrace import DataPool
from headrace.data.errors import InvalidInput
from headrace.pool import policies
from headrace.pool.channel import Channel
from headrace.pool.config import Limits
from headrace.pool.errors import NotFound, PoolFull

MANY = 60


def begun(pool: DataPool, channels: int) -> DataPool:
    for number in range(channels):
        pool.submit_step(one(f"first-{number}"), f"c{number}")
    return pool


def looked_at(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> set[str]:
    """The channels that a call swept, or asked what was due in them."""
    seen: set[str] = set()
    sweep, due = Channel.sweep, policies.due

    def seen_sweep(channel: Channel) -> None:
        seen.add(channel.name)
        sweep(channel)

    def seen_due(channel: Channel, now: float) -> Any:
        seen.add(channel.name)
        return due(channel, now)

    with monkeypatch.context() as patched:
        patched.setattr(Channel, "sweep", seen_sweep)
        patched.setattr(policies, "due", seen_due)
        call()
    return seen


CALLS: dict[str, Callable[[DataPool], Any]] = {
    "submit": lambda pool: pool.submit_step(one("new"), "c7"),
    "fetch": lambda pool: pool.fetch_batch(1, channel="c7", timeout=0),
    "fetch that waits": lambda pool: pool.fetch_batch(9, channel="c7", timeout=0),
    "reward": lambda pool: pool.reward("first-7", 1.0),
    "complete": lambda pool: pool.complete("first-7"),
    "fail": lambda pool: pool.fail("first-7", "it broke"),
    "curate": lambda pool: pool.curate("first-7", 0, quality=1.0),
    "open": lambda pool: pool.open("first-7", "first-7", "c7"),
    "trajectory": lambda pool: pool.trajectory("first-7"),
    "trajectory_states": lambda pool: pool.trajectory_states(["first-7"], "c7"),
    "unscored": lambda pool: pool.unscored("c7"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_looks_at_no_channel_but_its_own(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with begun(DataPool(), MANY) as pool:
        assert looked_at(monkeypatch, lambda: CALLS[name](pool)) <= {"c7"}


def test_a_call_about_the_whole_pool_looks_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    with begun(DataPool(), MANY) as pool:
        assert len(looked_at(monkeypatch, pool.stats)) == MANY


def test_a_trajectory_is_found_in_the_channel_that_was_begun_first() -> None:
    with DataPool() as pool:
        for channel in ("a", "b", "c"):
            pool.open("of another", channel=channel)
        for channel in ("c", "b"):
            pool.open("t", channel=channel)
        assert pool.trajectory("t").channel == "b"
        pool.fail("t", "it broke")
        assert pool.trajectory("t").channel == "c", "the one that is alive goes before the one that is gone"
        pool.fail("t", "it broke too")
        assert pool.stats("c")["counts"]["failed"] == 1
        check_rules(pool._state)


def test_what_no_channel_remembers_is_unknown() -> None:
    with DataPool(defaults={"tombstones": 1}) as pool:
        for uid in ("t0", "t1"):
            pool.submit_step(one(uid))
            assert pool.fetch_batch(1, timeout=0) is not None
        assert pool.reward("t1", 1.0) == "late"
        with pytest.raises(NotFound):
            pool.reward("t0", 1.0)
        check_rules(pool._state)


def test_nobody_is_remembered_who_waited_for_a_channel_that_never_came() -> None:
    with DataPool() as pool:
        for number in range(5):
            assert pool.fetch_batch(1, channel=f"never-{number}", timeout=0) is None
        assert not pool._waiters


def test_one_channel_too_many_is_refused_by_the_bound_and_its_field() -> None:
    with begun(DataPool(limits=Limits(max_channels=3)), 3) as pool:
        for call in (
            lambda: pool.submit_step(one("t"), "fourth"),
            lambda: pool.open("t", channel="fourth"),
            lambda: pool.configure("fourth", n_rollouts=2),
            lambda: pool.set_version(1, "fourth"),
        ):
            with pytest.raises(PoolFull, match=r"'fourth' would be one more than the 3 .*`max_channels`"):
                call()
        assert list(pool.stats()["channels"]) == ["c0", "c1", "c2"]
        assert pool.submit_step(one("t"), "c1").accepted == 1
        check_rules(pool._state)


def test_a_journal_with_more_channels_than_the_bound_opens_and_takes_no_other(tmp_path: Path) -> None:
    begun(DataPool(tmp_path / "pool"), 3).close()
    with DataPool(tmp_path / "pool", limits=Limits(max_channels=2)) as pool:
        assert pool.submit_step(one("t"), "c2").accepted == 1
        with pytest.raises(PoolFull, match="max_channels"):
            pool.submit_step(one("t"), "c3")


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "many"])
def test_a_bound_that_makes_no_sense_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match="max_channels must be an integer of at least 1"):
        Limits(max_channels=value)
