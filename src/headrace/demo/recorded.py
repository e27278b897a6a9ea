"""What the pool recorded of a first and of a last game: the ids of every call and their log-probs, as it has them.

The pool keeps a trajectory until the trainer has acknowledged what it learned from it, so the first game is read soon
after it was played, and the last one from what the agents had played ahead when the trainer stopped. Reading takes
nothing out.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.data.errors import HeadraceError
from headrace.data.step import Step
from headrace.demo.games import Game, first_games, last_games, trajectory_uid
from headrace.pool.connect import connect

__all__ = ["Both", "Call", "Recorded", "RecordedGame"]

FILE = "recorded.json"
#: Seconds that a pool is tried for: what it has is shown, and nobody waits for it.
RETRY_S = 2.0
#: Games that are looked at to choose one.
LOOKED_AT = 6


class Call(msgspec.Struct, frozen=True):
    """One step of the pool."""

    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    policy_version: int | None


class RecordedGame(msgspec.Struct, frozen=True):
    """A game as the agents told it, and its calls as the pool has them."""

    trajectory_uid: str
    game: Game
    calls: list[Call]


class Both(msgspec.Struct, frozen=True):
    first: RecordedGame | None = None
    last: RecordedGame | None = None


class Recorded:
    """The two games of a run; they are in its folder from when they were read."""

    def __init__(self, run: Path, seed: int) -> None:
        self._run = run
        self._seed = seed
        found = run / FILE
        self.games = msgspec.json.decode(found.read_bytes(), type=Both) if found.exists() else Both()
        self._looked = self.games.first is not None

    def keep_first(self, pool: str) -> None:
        """Reads one of the first games, once they were played; where the pool has none of them any more, none is."""
        if not self._looked and len(told := first_games(self._run, LOOKED_AT)) == LOOKED_AT:
            self._looked = True
            self._keep(msgspec.structs.replace(self.games, first=self._longest(pool, told)))

    def keep_last(self, pool: str) -> None:
        """Reads one of the last games."""
        last = self._longest(pool, last_games(self._run, LOOKED_AT))
        self._keep(msgspec.structs.replace(self.games, last=last or self.games.last))

    def _longest(self, pool: str, told: list[Game]) -> RecordedGame | None:
        """The longest of the games that the pool has: it shows most."""
        found = []
        with connect(pool, retry_s=RETRY_S) as there:
            for game in told:
                uid = trajectory_uid(self._seed, game.group)
                try:
                    steps = there.trajectory(uid).steps
                except HeadraceError:  # learned from already, or nobody answers
                    continue
                found.append(RecordedGame(uid, game, [_call(step) for step in steps]))
        return max(found, key=lambda game: len(game.calls), default=None)

    def _keep(self, games: Both) -> None:
        self.games = games
        (self._run / FILE).write_bytes(msgspec.json.encode(games))


def _call(step: Step) -> Call:
    return Call(
        step.prompt_ids.tolist(),
        step.response_ids.tolist(),
        [] if step.rollout_log_probs is None else step.rollout_log_probs.tolist(),
        step.policy_version,
    )
