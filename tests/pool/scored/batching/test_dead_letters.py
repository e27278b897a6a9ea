"""Groups that can never be served are named, with the reason; others never are."""

from __future__ import annotations

from tests.pool.scored.batching.naive import queued

from headrace.pool.scored.batching import Batching, DeadLetter


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
