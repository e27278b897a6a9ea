"""What the agents write into the run's folder, for others to read: games that were played, one of every group, and
counters of all that they did, so that a resumed run goes on counting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

import msgspec

GAMES_FILE = "games.jsonl"
#: Bytes that a game's line takes at most: a few messages of a few words.
MAX_LINE_BYTES = 4096


class Game(msgspec.Struct, frozen=True):
    """A game that is over; `group` is its group's number."""

    group: int
    hidden: int
    messages: list[dict[str, str]]
    reward: float

    @property
    def won(self) -> bool:
        return self.reward == 1.0

    def turns(self) -> Iterator[GameTurn]:
        """Every guess with what it was answered: the next hint, or how the game ended."""
        said = [message["content"] for message in self.messages[1:]]
        for guess, hint in zip(said[::2], [*said[1::2], "hit" if self.won else "missed"], strict=True):
            yield GameTurn(guess, hint)


class GameTurn(msgspec.Struct, frozen=True):
    """A guess, and what it was answered."""

    guess: str
    answer: str


def group_uid(seed: int, group: int) -> str:
    """The prompt uid of a group's games: by the seed and the group's number, so that none is used twice."""
    return f"s{seed}-g{group}"


def trajectory_uid(seed: int, group: int, rollout: int = 0) -> str:
    return f"{group_uid(seed, group)}-r{rollout}"


def append_game(file: IO[bytes], game: Game) -> None:
    """Adds a game; whoever reads the file sees it at once."""
    file.write(msgspec.json.encode(game) + b"\n")
    file.flush()


def first_games(run: Path, most: int) -> list[Game]:
    """The first games of a run; fewer where there are fewer."""
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
    """What is written to its end: a process that was killed may have left half a line."""
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Game))
        except msgspec.DecodeError:
            continue
    return found


COUNTERS_FILE = "agents.json"


class AgentCounters(msgspec.Struct):
    """`reserved` groups may have been begun, by this run of the agents or one before it: a uid is never used twice."""

    reserved: int = 0
    calls: int = 0
    games: int = 0
    wins: int = 0
    given_up: int = 0
    retries: int = 0
    at: float = 0.0


def read_counters(run: Path) -> AgentCounters:
    """The counters of a run; none yet are zeros."""
    try:
        return msgspec.json.decode((run / COUNTERS_FILE).read_bytes(), type=AgentCounters)
    except FileNotFoundError:
        return AgentCounters()


def write_counters(run: Path, counters: AgentCounters) -> None:
    """Replaces the file, so that a reader sees the old one or the new one."""
    counters.at = time.time()
    beside = run / f"{COUNTERS_FILE}.new"
    beside.write_bytes(msgspec.json.encode(counters))
    os.replace(beside, run / COUNTERS_FILE)
