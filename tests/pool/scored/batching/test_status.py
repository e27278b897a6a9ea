"""The numbers of `/status-env`."""

from __future__ import annotations

import pytest
from tests.pool.scored.batching.naive import queued

from headrace.data.errors import InvalidInput
from headrace.pool.scored.batching import Batching
from headrace.pool.scored.environments import EnvQueueStatus


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
