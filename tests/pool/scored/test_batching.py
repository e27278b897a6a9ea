"""Buffers, where groups of an odd size wait for others, and dead letters, which no batch can ever hold."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pool.scored.naive import Posted, oldest_fill, queued

from headrace.data.errors import InvalidInput
from headrace.pool.scored.batching import Added, Batching, DeadLetter

# -- buffers -----------------------------------------------------------------------------------------------------------


def with_group_size(group_size: int) -> Batching:
    batching = Batching()
    batching.connect(0, group_size=group_size, max_token_length=1)
    return batching


def first_fit(groups: list[Posted], target: int) -> list[int]:
    fitting: list[Posted] = []
    for group in groups:
        if sum(each.size for each in fitting) + group.size <= target:
            fitting.append(group)
    return [each.number for each in fitting] if sum(each.size for each in fitting) == target else []


@given(st.lists(st.integers(1, 9), max_size=14), st.integers(1, 8))
def test_first_fit_then_any_combination(sizes: list[int], group_size: int) -> None:
    batching, buffer = with_group_size(group_size), []
    for number, size in enumerate(sizes):
        added = batching.add(number, 0, size)
        if size == group_size:
            assert added == Added("received", (number,))
            continue
        buffer.append(Posted(number, 0, size))
        matched = first_fit(buffer, group_size) or oldest_fill(buffer, group_size) or []
        buffer = [group for group in buffer if group.number not in matched]
        assert added == Added("buffered", tuple(matched), sum(group.size for group in buffer))


def test_matched_groups_enter_as_the_youngest_and_as_groups_of_their_own() -> None:
    batching = with_group_size(4)
    for number, size in enumerate([3, 4, 4, 1]):
        batching.add(number, 0, size)
    assert len(batching) == 4
    assert [batching.take(4), batching.take(4), batching.take(4)] == [[1], [2], [0, 3]]


def test_groups_of_no_environment_or_an_unknown_one_are_not_buffered() -> None:
    batching = with_group_size(4)
    assert [batching.add(number, env, 3).status for number, env in enumerate([None, 7, -1])] == ["received"] * 3


def test_a_disconnected_environments_late_groups_are_matched_still() -> None:
    batching = with_group_size(4)
    batching.add(0, 0, 3)
    batching.disconnect(0)
    assert batching.add(1, 0, 1).entered == (0, 1)


def test_a_new_group_size_lets_in_what_makes_it_up() -> None:
    batching = with_group_size(8)
    for number in range(4):
        batching.add(number, 0, 1)
    assert batching.connect(0, group_size=2, max_token_length=1) == (0, 1, 2, 3)
    assert batching.buffered(0) == 0


@pytest.mark.parametrize(("number", "size", "message"), [(0, 4, "group 0 is here already"), (1, 0, "has 0 sequences")])
def test_a_number_twice_and_an_empty_group_are_refused(number: int, size: int, message: str) -> None:
    batching = with_group_size(4)
    batching.add(0, 0, 4)
    with pytest.raises(InvalidInput, match=message):
        batching.add(number, 0, size)


# -- dead letters ------------------------------------------------------------------------------------------------------


def test_a_group_larger_than_the_batch() -> None:
    assert queued([(0, 4), (1, 16)]).dead_letters(8) == {
        1: DeadLetter("too_large", "its 16 sequences exceed batch_size 8")
    }


def test_a_size_that_no_batch_can_hold_once_a_batch_is_queued() -> None:
    batching = queued([(0, 3), (0, 3)])
    assert batching.dead_letters(8) == {}
    batching.add(2, 0, 3)
    assert set(batching.dead_letters(8)) == {0, 1, 2}
    assert batching.dead_letters(8)[0] == DeadLetter("unmatched", "no groups make up its 3 sequences to batch_size 8")


def test_a_batch_as_large_as_a_number_can_be_is_taken_to_hold_any_size() -> None:
    """Which sums come to it is not worked out: that would take a bit for each number up to it."""
    batching, most = queued([(0, 4), (0, 6)]), 2**31 - 1
    tracemalloc.start()
    try:
        assert batching.may_fit(4, most)
        assert batching.dead_letters(most, condemned={4, 6}) == {}
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_size_that_a_connected_environment_can_complete_is_waited_for() -> None:
    batching = queued([(0, 3)] * 4)
    batching.connect(1, group_size=2, max_token_length=1)
    assert batching.dead_letters(8) == {}
    batching.disconnect(1)
    assert set(batching.dead_letters(8)) == {0, 1, 2, 3}


def test_a_size_that_groups_which_are_out_can_complete_is_waited_for() -> None:
    batching = queued([(0, 3)] * 5 + [(1, 2)])
    batching.disconnect(1)
    batch = batching.take(8)
    assert batch is not None
    assert batching.dead_letters(8) == {}
    batching.give_back(batch)
    assert batching.dead_letters(8) == {}
    batching.forget(batch)
    assert set(batching.dead_letters(8)) == set(range(5)).difference(batch)


def test_a_buffered_group_larger_than_its_environments_groups() -> None:
    batching = Batching()
    batching.connect(0, group_size=4, max_token_length=1)
    batching.add(0, 0, 6)
    batching.add(1, 0, 3)
    assert batching.dead_letters(128) == {0: DeadLetter("too_large", "its 6 sequences exceed group_size 4")}


def test_a_buffer_that_only_grows_is_given_up() -> None:
    batching = Batching()
    batching.connect(0, group_size=4, max_token_length=1)
    for number in range(85):
        batching.add(number, 0, 3)
    assert batching.dead_letters(128) == {}
    batching.add(85, 0, 3)
    assert len(batching.dead_letters(128)) == 86


def test_the_dead_are_gone_once_forgotten() -> None:
    batching = queued([(0, 4), (1, 16)])
    batching.forget(batching.dead_letters(8))
    assert batching.dead_letters(8) == {}
    assert batching.status(0, 8).max_group_size == 4
