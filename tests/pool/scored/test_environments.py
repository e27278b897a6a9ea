"""Environments: their minimum shares of a batch, and what `/status-env` tells them."""

from __future__ import annotations

import pytest
from tests.pool.scored.naive import queued

from headrace.data.errors import InvalidInput
from headrace.pool.scored.batching import Batching
from headrace.pool.scored.environments import EnvQueueStatus

# -- minimum shares: first these, then the rest by age -----------------------------------------------------------------


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


# -- the numbers of /status-env ----------------------------------------------------------------------------------------


def connected(*settings: dict[str, float]) -> Batching:
    batching = Batching()
    for env, each in enumerate(settings):
        batching.connect(env, **{"group_size": 2, "max_token_length": 100, **each})  # type: ignore[arg-type]
    return batching


def test_an_empty_queue() -> None:
    assert connected({}).status(0, 8) == EnvQueueStatus(0, 1.0, 1.0, 0, 1)


def test_weights_are_by_token_length_times_weight_over_connected_environments() -> None:
    batching = connected({"weight": 3.0}, {}, {"weight": 50.0})
    batching.disconnect(2)
    assert batching.status(0, 8).env_weight == 0.75


def test_no_weight_is_below_one_hundredth() -> None:
    assert connected({"weight": 0.0}, {}).status(0, 8).env_weight == 0.01


def test_with_everybody_gone_or_weightless_there_is_an_answer() -> None:
    batching = connected({"weight": 0.0})
    assert batching.status(0, 8).env_weight == 0.01
    batching.disconnect(0)
    assert batching.status(0, 8).env_weight == 0.01


def test_a_silent_environment_has_no_weight_until_it_is_heard() -> None:
    batching = connected({}, {})
    batching.silence(1)
    assert batching.status(0, 8).env_weight == 1.0
    batching.silence(1, False)
    assert batching.status(0, 8).env_weight == 0.5


def test_the_unallocated_fraction_is_what_shares_leave() -> None:
    assert connected({"min_allocation": 0.25}, {"min_allocation": 0.5}).status(0, 8).unallocated_fraction == 0.25
    assert connected({"min_allocation": 0.75}, {"min_allocation": 0.5}).status(0, 8).unallocated_fraction == 0.0


def test_others_count_in_packs_less_their_minimum() -> None:
    batching = queued([(0, 4)] * 3 + [(1, 2)] * 3 + [(2, 1)], {2: 0.25})
    batching.connect(0, group_size=4, max_token_length=1)
    status = batching.status(0, 8)  # 12 + (6 -> 8) + (1 -> 4, less 2)
    assert (status.queue_size, status.self_queue_size, status.max_group_size) == (5, 3, 4)


def test_others_count_where_every_group_is_of_one_sequence() -> None:
    batching = queued([(0, 1), (1, 1), (1, 1)])
    assert batching.status(0, 8).queue_size == 3


def test_an_unknown_environment_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no environment 3 was connected"):
        connected({}).status(3, 8)
