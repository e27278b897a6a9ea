"""Who makes room in a full channel."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tests.pool.kit import drain, group, step, trajectory

from headrace import DataPool
from headrace.pool.containers import EvictionQueue
from headrace.pool.groups import GroupState


def full(**options: Any) -> DataPool:
    return DataPool(channels={"train": {"max_queue_size": 4, **options}})


def prompts(pool: DataPool) -> list[str]:
    return [row["prompt_uid"] for row in pool.list_groups()["items"]]


def test_announcements_without_a_step_displace_half_of_what_was_sampled_at_most() -> None:
    with full() as pool:
        pool.submit_steps([*group("a"), *group("b"), *group("c"), *group("d")])
        for n in range(10):
            pool.open(f"t{n}", f"empty{n}")
        assert prompts(pool) == ["c", "d", "empty8", "empty9"]
        pool.submit_steps(group("e"))
        assert prompts(pool) == ["d", "empty8", "empty9", "e"], "the oldest"


def test_in_a_channel_full_of_sampled_groups_an_announced_one_gets_its_steps() -> None:
    with full() as pool:
        for name in "abcd":
            pool.submit_steps(group(name))
        for n in range(2):
            pool.open(f"new{n}", f"new{n}")
        for n in range(2):
            assert pool.submit_step(step(f"new{n}", 0, f"new{n}")).late == 0
        assert prompts(pool) == ["c", "d", "new0", "new1"]


def test_one_that_got_a_step_is_empty_no_longer() -> None:
    with full() as pool:
        for n in range(5):
            pool.open(f"t{n}", f"p{n}")  # the first of them is gone
        pool.submit_step(step("t1", 0, "p1"))
        pool.open("more", "more")
        assert prompts(pool) == ["p1", "p3", "p4", "more"]


@pytest.mark.parametrize("by_owner", [False, True])
def test_an_owner_displaces_its_own(by_owner: bool) -> None:
    with full(by_owner=by_owner) as pool:
        pool.submit_steps(trajectory("a/1", 1, "a/1"))
        for n in range(8):
            pool.submit_steps(trajectory(f"b/{n}", 1, f"b/{n}"))
        left = ["b/4", "b/5", "b/6", "b/7"]
        assert prompts(pool) == (["a/1", *left[1:]] if by_owner else left)


def test_an_option_that_changes_holds_at_once() -> None:
    with full() as pool:
        for n in range(5):
            pool.submit_steps(trajectory(f"b/{n}", 1, f"b/{n}"))
        pool.submit_steps(trajectory("a/1", 1, "a/1"))
        pool.configure(by_owner=True)
        pool.submit_steps([*trajectory("b/5", 1, "b/5"), *trajectory("b/6", 1, "b/6")])
        assert prompts(pool) == ["b/4", "a/1", "b/5", "b/6"]
        assert sorted(drain(pool)) == ["a/1", "b/4", "b/5", "b/6"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30), st.integers(0, 40))
def test_the_least_are_as_many_as_asked_for_and_leave_everybody_as_even_as_can_be(
    line: list[tuple[str, bool]], count: int
) -> None:
    groups = [GroupState(f"{owner}/{n}", n, 0.0) for n, (owner, _) in enumerate(line)]
    for made, (_, filled) in zip(groups, line, strict=True):
        made.queued = int(filled)
    crowd = EvictionQueue(groups, by_owner=True)
    found = crowd.pick(count)
    assert len(found) == len(set(found)) == min(count, len(line))
    sizes = {owner: sum(one == owner for one, _ in line) for owner in "abc"}
    taken = {owner: [seq for seq in found if line[seq][0] == owner] for owner in "abc"}
    level = max((sizes[owner] - len(taken[owner]) for owner in "abc"), default=0)
    for owner, of in taken.items():
        if of:
            assert sizes[owner] - len(of) >= level - 1, "nobody who has less gives"
        own = [n for n, (one, _) in enumerate(line) if one == owner]
        empty = [n for n in own if not line[n][1]]
        first = empty[: max(0, len(empty) - len(own) // 2)]
        assert sorted(of) == sorted([*first, *(n for n in own if n not in first)][: len(of)])
