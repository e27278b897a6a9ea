"""The progress of a run (`DemoProgress`): the trainer's metrics and the agents' counters, read from the run's folder as
they grow. And what the pool recorded of a first and of a last game (`GameRecords`): the ids of every call and their
log-probs.

The pool keeps a trajectory until the trainer has acknowledged it, so the first game is read soon after it was played,
and the last one from those played ahead when the trainer stopped. Reading consumes nothing.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.data.errors import HeadraceError
from headrace.data.step import Step
from headrace.demo import games
from headrace.demo.games import Game, first_games, last_games, trajectory_uid
from headrace.demo.recipe import LEARNED_REWARD, LEARNED_STEPS
from headrace.files import read_json, write_whole
from headrace.pool.connect import connect
from headrace.run.progress import RunProgress, averaged

#: Steps that the curve's speed is taken over: fewer are mostly chance.
SPEED_STEPS = 2 * LEARNED_STEPS
#: What the moving average must have risen in that time before its speed says anything.
LEAST_RISE = 0.03


class DemoProgress(RunProgress):
    """The progress of a run, with the agents' counters and one of the last games."""

    def __init__(self, run: Path, trainer: Path) -> None:
        super().__init__(trainer)
        self._run = run
        self.counters = games.read_counters(run)
        #: One of the last games that ended.
        self.game: Game | None = None

    def refresh(self) -> bool:
        self.counters = games.read_counters(self._run)
        self.game = next(iter(last_games(self._run, 1)), self.game)
        return super().refresh()

    @property
    def learned(self) -> bool:
        """Whether the moving average has reached `LEARNED_REWARD`."""
        return len(self.rewards) >= LEARNED_STEPS and averaged(self.rewards[-LEARNED_STEPS:])[-1] >= LEARNED_REWARD

    def seconds_left(self, most: int) -> float | None:
        """Seconds until `LEARNED_REWARD` is reached, or all of `most` steps are done, if the curve goes on as of late;
        None while that cannot be estimated."""
        curve = averaged(self.rewards)
        if len(curve) <= SPEED_STEPS:
            return None
        seconds: list[float] = [row["seconds"] for row in self.rows[-SPEED_STEPS:] if row.get("seconds") is not None]
        rise = curve[-1] - curve[-1 - SPEED_STEPS]
        if rise < LEAST_RISE or not seconds:
            return None
        steps = max(LEARNED_REWARD - curve[-1], 0.0) * SPEED_STEPS / rise
        return min(steps, most - len(self.rows)) * sum(seconds) / len(seconds)


RECORDED_FILE = "recorded.json"
#: Seconds for which the pool is tried: its records are shown where it answers, and else left out.
POOL_RETRY_S = 2.0
#: Games that are looked at to choose one.
CANDIDATE_GAMES = 6


class RecordedCall(msgspec.Struct, frozen=True):
    """One step of the pool, as the report shows it."""

    prompt_ids: list[int]
    response_ids: list[int]
    log_probs: list[float]
    policy_version: int | None


class RecordedGame(msgspec.Struct, frozen=True):
    """A game as the agents wrote it, with its calls as the pool has them."""

    trajectory_uid: str
    game: Game
    calls: list[RecordedCall]


class FirstAndLast(msgspec.Struct, frozen=True):
    """One of a run's first games and one of its last; None where none could be read."""

    first: RecordedGame | None = None
    last: RecordedGame | None = None


class GameRecords:
    """The first and last game of a run, kept in its folder once they were read."""

    def __init__(self, run: Path, seed: int) -> None:
        self._run = run
        self._seed = seed
        found = run / RECORDED_FILE
        self.games = read_json(found, FirstAndLast) if found.exists() else FirstAndLast()
        self._looked = self.games.first is not None

    def keep_first(self, pool: str) -> None:
        """Reads one of the first games once they were played; none where the pool has none of them any more."""
        if not self._looked and len(told := first_games(self._run, CANDIDATE_GAMES)) == CANDIDATE_GAMES:
            self._looked = True
            self._keep(msgspec.structs.replace(self.games, first=self._longest(pool, told)))

    def keep_last(self, pool: str) -> None:
        """Reads one of the last games."""
        last = self._longest(pool, last_games(self._run, CANDIDATE_GAMES))
        self._keep(msgspec.structs.replace(self.games, last=last or self.games.last))

    def _longest(self, pool: str, told: list[Game]) -> RecordedGame | None:
        """The longest of the games that the pool still has, which shows most."""
        found = []
        with connect(pool, retry_s=POOL_RETRY_S) as there:
            for game in told:
                uid = trajectory_uid(self._seed, game.group)
                try:
                    steps = there.trajectory(uid).steps
                except HeadraceError:  # learned from already, or the pool is away
                    continue
                found.append(RecordedGame(uid, game, [_call(step) for step in steps]))
        return max(found, key=lambda game: len(game.calls), default=None)

    def _keep(self, games: FirstAndLast) -> None:
        self.games = games
        write_whole(self._run / RECORDED_FILE, msgspec.json.encode(games))


def _call(step: Step) -> RecordedCall:
    return RecordedCall(
        step.prompt_ids.tolist(),
        step.response_ids.tolist(),
        [] if step.rollout_log_probs is None else step.rollout_log_probs.tolist(),
        step.policy_version,
    )
