"""`AgeOrderedSet` behaves as a sorted set, whatever its sweeping does inside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.pool import containers
from headrace.pool.containers import AgeOrderedSet

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
