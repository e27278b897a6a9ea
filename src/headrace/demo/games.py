"""The files that the agents write into the run's folder: one game of every group, and counters over all that they did,
so that a resumed run continues counting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

import msgspec

from headrace.files import write_whole

GAMES_FILE = "games.jsonl"
#: Bytes that a game's line takes at most: a few messages of a few words.
MAX_LINE_BYTES = 4096


class Game(msgspec.Struct, frozen=True):
    """A finished game; `group` is its group's number."""

    group: int
    hidden: int
    messages: list[dict[str, str]]
    reward: float

    @property
    def won(self) -> bool:
        return self.reward == 1.0

    def turns(self) -> Iterator[GameTurn]:
        """Every guess with its answer: the next hint, or how the game ended."""
        said = [message["content"] for message in self.messages[1:]]
        for guess, hint in zip(said[::2], [*said[1::2], "hit" if self.won else "missed"], strict=True):
            yield GameTurn(guess, hint)


class GameTurn(msgspec.Struct, frozen=True):
    """A guess and its answer."""

    guess: str
    answer: str


def group_uid(seed: int, group: int) -> str:
    """The prompt uid of a group's games, unique by seed and group number."""
    return f"s{seed}-g{group}"


def trajectory_uid(seed: int, group: int, rollout: int = 0) -> str:
    """The uid of one game, unique by seed, group number and rollout."""
    return f"{group_uid(seed, group)}-r{rollout}"


def append_game(file: IO[bytes], game: Game) -> None:
    """Appends a game and flushes, so that readers see it at once."""
    file.write(msgspec.json.encode(game) + b"\n")
    file.flush()


def first_games(run: Path, most: int) -> list[Game]:
    """The first games of a run, at most so many."""
    try:
        with (run / GAMES_FILE).open("rb") as file:
            return _games(list(islice(file, most)))
    except FileNotFoundError:
        return []


def last_games(run: Path, most: int) -> list[Game]:
    """The last games of a run, in order."""
    try:
        with (run / GAMES_FILE).open("rb") as file:
            file.seek(max(file.seek(0, 2) - (most + 1) * MAX_LINE_BYTES, 0))
            began = file.tell()
            lines = file.readlines()
    except FileNotFoundError:
        return []
    return _games(lines[1:] if began else lines)[-most:]


def _games(lines: list[bytes]) -> list[Game]:
    """The games in complete lines: a killed process may have left half a line."""
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Game))
        except msgspec.DecodeError:
            continue
    return found


COUNTERS_FILE = "agents.json"


class AgentCounters(msgspec.Struct):
    """Counters over a run. `reserved` is the number of groups that may have been begun, before a resume included: no
    uid is used twice."""

    reserved: int = 0
    calls: int = 0
    games: int = 0
    wins: int = 0
    given_up: int = 0
    retries: int = 0
    at: float = 0.0


def read_counters(run: Path) -> AgentCounters:
    """The counters of a run; zeros where there is no file."""
    try:
        return msgspec.json.decode((run / COUNTERS_FILE).read_bytes(), type=AgentCounters)
    except FileNotFoundError:
        return AgentCounters()


def write_counters(run: Path, counters: AgentCounters) -> None:
    """Replaces the file atomically."""
    counters.at = time.time()
    write_whole(run / COUNTERS_FILE, msgspec.json.encode(counters))
