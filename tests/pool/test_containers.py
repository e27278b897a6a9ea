"""`AgeOrderedSet` behaves as a sorted set, whatever its sweeping does inside; `RememberedReplies` forgets by its rule,
whenever it is looked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pool import containers
from headrace.pool.containers import AgeOrderedSet, RememberedReplies
from headrace.pool.groups import Lease

#: Numbers are added in any order, taken out and put back: what a queue with returning leases does.
CHANGES = st.lists(st.tuples(st.sampled_from(["add", "discard", "read", "reverse"]), st.integers(0, 40)), max_size=200)


@pytest.mark.parametrize("few", [0, 3, 1024])
@given(changes=CHANGES)
def test_it_holds_what_a_sorted_set_would(few: int, changes: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(containers, "DEAD_ENTRIES_KEPT", few)
        ours, model = AgeOrderedSet(), set[int]()
        for what, number in changes:
            if what == "add":
                ours.add(number)
                model.add(number)
            elif what == "discard":
                ours.discard(number)
                model.discard(number)
            elif what == "read":
                assert list(ours) == sorted(model)
            else:
                assert list(reversed(ours)) == sorted(model, reverse=True)
            assert len(ours) == len(model)
            assert (number in ours) == (number in model)
            assert ours.first == min(model, default=None)
        assert list(ours) == sorted(model)


STORIES = st.lists(
    st.one_of(
        st.tuples(st.just("hand out"), st.sampled_from(["a/{}", "b/{}", "{}"])),
        st.tuples(st.just("wait"), st.sampled_from([1.0, 30.0, 89.0, 90.0, 511.0])),
        st.tuples(st.just("look"), st.none()),
    ),
    max_size=60,
)


def remembered(replies: list[tuple[str, float]], now: float, kept: int, most: int) -> list[tuple[str, float]]:
    """Those of some requests, each with when it was answered, that may be asked for again, in the rule's own words."""
    found = []
    for place, (request, at) in enumerate(replies):
        newer = [other for other, _ in replies[place + 1 :]]
        own = [other for other in newer if other.rpartition("/")[0] == request.rpartition("/")[0]]
        among_the_newest = len(own) < kept and len(newer) < most
        if kept and now - at < 600 and (now - at < 90 or among_the_newest):
            found.append((request, at))
    return found


@given(story=STORIES, kept=st.integers(0, 3), most=st.integers(1, 5))
def test_replies_are_forgotten_by_age_and_number_whenever_it_is_looked(
    story: list[tuple[str, Any]], kept: int, most: int
) -> None:
    ours, model, now = RememberedReplies(most), list[tuple[str, float]](), 0.0
    for number, (what, about) in enumerate(story):
        if what == "wait":
            now += about
        elif what == "look":  # the model does not
            ours.expire(now, kept)
        else:
            request = about.format(number)
            ours.expire(now, kept)
            ours.add(Lease("", 0.0, request), now, leased=False)
            model = [*remembered(model, now, kept, most), (request, now)]
    ours.expire(now, kept)
    assert [(request, reply.at) for request, reply in ours.items()] == remembered(model, now, kept, most)
