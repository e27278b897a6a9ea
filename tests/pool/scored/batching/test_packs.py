"""A queue whose sizes divide the largest, and the largest the batch: packs, taken as they became full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pool.scored.batching.naive import Line, lines, packs, posted, queued

from headrace.data.errors import InvalidInput


@given(lines([1, 2, 4], longest=40), st.sampled_from([4, 8, 16]))
def test_batches_are_those_of_the_contracts_words(line: Line, batch_size: int) -> None:
    batching, left = queued(line), posted(line)
    for _ in range(8):
        expected, worth = packs(left, batch_size), sum(group.size for group in left)
        if expected is None and worth >= 2 * batch_size:
            return  # stuck: filled by age
        if left and batch_size % max(group.size for group in left):
            return
        assert batching.take(batch_size) == expected
        left = [group for group in left if group.number not in (expected or ())]


def test_a_pack_leaves_when_it_is_full_even_if_its_first_group_is_older() -> None:
    batching = queued([(0, 1), (1, 4), (1, 4), (0, 1), (0, 1), (0, 1)])
    assert batching.take(8) == [1, 2]


def test_groups_of_different_environments_share_a_pack() -> None:
    assert queued([(0, 2), (1, 4), (2, 2)]).take(8) == [1, 0, 2]


def test_too_few_full_packs_are_not_a_batch() -> None:
    assert queued([(0, 4), (1, 2), (2, 1), (2, 1)]).take(8) is None


def test_two_batches_worth_in_packs_that_are_not_full_are_filled_by_age() -> None:
    not_full = [(0, 6)] + [(0, 4)] * 2 + [(0, 3)] * 3 + [(0, 2)] * 5
    assert queued([*not_full, (1, 12)]).take(24) is None
    batching = queued(not_full + [(0, 1)] * 11 + [(1, 12)])
    assert batching.take(24) == [0, 1, 2, 3, 4, 5, 11]
    assert batching.take(24) is None


def test_a_group_that_its_size_leaves_alone_is_served_after_sixteen_batches() -> None:
    batching = queued([(0, 4), (1, 2), (1, 2)] + [(2, 8)] * 40)
    batches = [batching.take(16) or [] for _ in range(17)]
    assert all(not {0, 1, 2} & set(batch) for batch in batches[:16])
    assert batches[16][:3] == [0, 1, 2]


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(InvalidInput, match="batch_size must be at least 1, not 0"):
        queued([(0, 1)]).take(0)
