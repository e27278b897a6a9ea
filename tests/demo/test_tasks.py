"""The number game: its rules, and that binary search is what they ask for."""

from __future__ import annotations

import pytest

from headrace.demo.tasks import TASKS, NumberGame, NumberTask

NUMBER = TASKS["number"]


def play(game: NumberGame, *replies: str) -> NumberGame:
    for reply in replies:
        game.reply(reply)
    return game


def hints(game: NumberGame) -> list[str]:
    return [message["content"] for message in game.messages if message["role"] == "user"][1:]


def search(game: NumberGame) -> NumberGame:
    """Binary search, by what the messages say alone."""
    low, high = 1, game.task.numbers
    while game.reward is None:
        if hint := hints(game)[-1:]:
            guess = int(game.messages[-2]["content"])
            low, high = (guess + 1, high) if hint == ["higher"] else (low, guess - 1)
        game.reply(str((low + high) // 2))
    return game


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_binary_search_always_wins(task: NumberTask) -> None:
    assert [search(NumberGame(task, hidden)).reward for hidden in range(1, task.numbers + 1)] == [1.0] * task.numbers


def test_a_hint_says_on_which_side_the_number_is() -> None:
    assert hints(play(NumberGame(NUMBER, 5), "4", "6")) == ["higher", "lower"]


def test_a_hit_ends_the_game_with_a_reward_of_1() -> None:
    assert play(NumberGame(NUMBER, 5), "4", "5").reward == 1.0


def test_the_last_miss_ends_the_game_with_a_reward_of_0() -> None:
    game = play(NumberGame(NUMBER, 5), "1", "2")
    assert game.reward is None
    assert play(game, "3").reward == 0.0


@pytest.mark.parametrize("reply", ["", "0", "7", "44", " 4", "four", "4.", "٤"])
def test_a_reply_that_is_no_guess_ends_the_game(reply: str) -> None:
    assert play(NumberGame(NUMBER, 4), reply).reward == 0.0


def test_the_conversation_alternates_and_ends_with_the_player() -> None:
    game = play(NumberGame(NUMBER, 6), "1", "2", "3")
    assert [message["role"] for message in game.messages] == ["user", "assistant"] * 3


def test_what_is_hidden_depends_on_the_seed_and_the_group_alone() -> None:
    drawn = [NUMBER.game(3, group).hidden for group in range(50)]
    assert drawn == [NUMBER.game(3, group).hidden for group in range(50)]
    assert drawn != [NUMBER.game(4, group).hidden for group in range(50)]


def test_as_many_groups_in_a_row_as_there_are_numbers_hide_each_once() -> None:
    for first in range(0, 10 * NUMBER.numbers, NUMBER.numbers):
        drawn = {NUMBER.game(0, group).hidden for group in range(first, first + NUMBER.numbers)}
        assert drawn == set(range(1, NUMBER.numbers + 1))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_more_than_one_first_guess_wins_every_game(task: NumberTask) -> None:
    """A policy that is sure of its first guess need not unlearn it to win."""

    def wins(low: int, high: int, guesses: int) -> bool:
        return high - low + 1 < 2**guesses

    left = task.guesses - 1
    first = [n for n in range(1, task.numbers + 1) if wins(1, n - 1, left) and wins(n + 1, task.numbers, left)]
    assert len(first) > 1
