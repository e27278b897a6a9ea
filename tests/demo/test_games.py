"""Games in a run's folder: told as they end, read from either end."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.demo import games
from headrace.demo.games import (
    Game,
    GameTurn,
    first_games,
    last_games,
)
from headrace.demo.tasks import TASKS


def played(group: int, hidden: int, *guesses: str) -> Game:
    game = TASKS["number"].game(seed=0, group=group)
    game.hidden = hidden
    for guess in guesses:
        game.reply(guess)
    assert game.reward is not None
    return Game(group, hidden, game.messages, game.reward)


def write(run: Path, *told: Game) -> None:
    with (run / games.GAMES_FILE).open("ab") as file:
        for game in told:
            games.append_game(file, game)


@pytest.mark.parametrize(
    ("guesses", "turns"),
    [
        (("4", "6", "5"), [("4", "higher"), ("6", "lower"), ("5", "hit")]),
        (("4", "6", "7"), [("4", "higher"), ("6", "lower"), ("7", "missed")]),
        (("higher",), [("higher", "missed")]),
    ],
)
def test_every_guess_has_its_answer(guesses: tuple[str, ...], turns: list[tuple[str, str]]) -> None:
    assert list(played(0, 5, *guesses).turns()) == [GameTurn(*turn) for turn in turns]


def test_games_are_read_from_either_end(tmp_path: Path) -> None:
    write(tmp_path, *(played(group, 4, "4") for group in range(300)))
    assert [game.group for game in first_games(tmp_path, 3)] == [0, 1, 2]
    assert [game.group for game in last_games(tmp_path, 3)] == [297, 298, 299]


def test_a_run_without_games_has_none(tmp_path: Path) -> None:
    assert first_games(tmp_path, 3) == last_games(tmp_path, 3) == []


def test_half_a_line_of_a_process_that_was_killed_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, played(0, 4, "4"))
    with (tmp_path / games.GAMES_FILE).open("ab") as file:
        file.write(b'{"group": 1, "hid')
    write(tmp_path, played(2, 4, "4"), played(3, 4, "4"))
    assert [game.group for game in last_games(tmp_path, 9)] == [0, 3]
