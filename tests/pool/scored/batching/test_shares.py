"""Minimum allocations: an environment's share first, then the rest by age."""

from __future__ import annotations

import pytest
from tests.pool.scored.batching.naive import queued

from headrace.data.errors import InvalidInput
from headrace.pool.scored.batching import Batching


def test_a_share_is_taken_from_however_far_behind() -> None:
    batching = queued([(0, 2)] * 10 + [(1, 2)] * 3, {1: 0.5})
    assert batching.take(8) == [0, 1, 10, 11]


def test_without_data_a_share_is_nobodys_loss() -> None:
    assert queued([(0, 2)] * 4, {1: 0.5}).take(8) == [0, 1, 2, 3]


def test_with_too_little_data_a_share_is_what_there_is() -> None:
    assert queued([(0, 2)] * 6 + [(1, 2)], {1: 0.5}).take(8) == [0, 1, 2, 6]


def test_shares_over_one_are_scaled_down() -> None:
    batching = queued([(2, 1)] * 8 + [(0, 1)] * 8 + [(1, 1)] * 8, {0: 0.9, 1: 0.9})
    assert batching.take(8) == [8, 9, 10, 11, 16, 17, 18, 19]


def test_a_share_is_rounded_down_to_sequences_and_up_to_groups() -> None:
    batching = queued([(0, 4)] * 4 + [(1, 4)] * 2, {1: 0.45})  # 3.6 of 8: 3 sequences, one group
    assert batching.take(8) == [0, 4]


def test_what_a_full_batch_cannot_give_is_not_waited_for() -> None:
    batching = queued([(0, 3), (0, 3), (1, 4), (1, 4)], {0: 0.5, 1: 0.5})  # 3 + 3 + … is never 8
    assert batching.take(8) == [2, 3]


def test_a_share_that_no_full_batch_meets_is_met_as_far_as_one_can() -> None:
    line = [(1, 4), (1, 4), (1, 2), (0, 3), (0, 3), (0, 3)]
    assert queued(line, {0: 0.8}).take(10) == [0, 3, 4]  # 8 of 10 asked for: 9 leave 1 that nothing fills, so 6


def test_a_share_ends_with_the_connection() -> None:
    batching = queued([(0, 2)] * 4 + [(1, 2)] * 4, {1: 0.5})
    batching.disconnect(1)
    assert batching.take(8) == [0, 1, 2, 3]


@pytest.mark.parametrize("share", [float("nan"), float("inf")])
def test_a_share_that_is_no_number_is_refused(share: float) -> None:
    with pytest.raises(InvalidInput, match="min_allocation must be a finite number"):
        Batching().connect(0, group_size=1, max_token_length=1, min_allocation=share)
