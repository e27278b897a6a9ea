"""The progress of the demo: the view of a run, with the agents' calls and one game after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.text import Text

from headrace.data.visible import visible
from headrace.demo.games import Game
from headrace.demo.progress import DemoProgress
from headrace.demo.recipe import LEARNED_REWARD
from headrace.run.view import RunView

#: Seconds that a rate is taken over.
RATE_S = 10.0
#: Seconds after which the next turn of a game is shown, and for which the whole game then stays.
TURN_S, STAYS_S = 0.5, 1.5


class DemoView(RunView):
    """Shows a run's progress. `clock` is in seconds."""

    goal = LEARNED_REWARD

    def __init__(
        self, console: Console, progress: DemoProgress, steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console, progress, steps, clock)
        self._demo = progress
        self._seen = deque([(clock(), progress.counters.calls)])
        self._replay = GameReplay(clock)

    def update(self) -> None:
        self._replay.show(self._demo.game)
        super().update()

    def finish(self) -> None:
        self._replay.end(self._demo.game)
        super().finish()

    @property
    def learned(self) -> bool:
        return self._demo.learned

    def figures(self) -> list[tuple[str, str]]:
        counters = self._demo.counters
        shown = [
            *super().figures(),
            ("calls", f"{counters.calls:,}"),
            ("calls/s", f"{self._rate(counters.calls):,.0f}"),
        ]
        if counters.given_up:
            shown.append(("given up", f"{counters.given_up}"))
        return shown

    def below(self) -> list[RenderableType]:
        return [self._replay.text()]

    def seconds_left(self) -> float | None:
        return self._demo.seconds_left(self.steps)

    def _rate(self, calls: int) -> float:
        """Calls per second, over the last `RATE_S`."""
        now = self.clock()
        self._seen.append((now, calls))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_S:
            self._seen.popleft()
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return (after - before) / (last - first) if last > first else 0.0


class GameReplay:
    """Shows one game after another, turn by turn, slowly enough to follow; most games are not shown."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._game: Game | None = None
        self._since = 0.0
        self._whole = False

    def show(self, newest: Game | None) -> None:
        """Continues the game that is shown, or switches to the newest once it was shown for long enough."""
        turns = len(list(self._game.turns())) if self._game is not None else 0
        if self._clock() - self._since >= turns * TURN_S + STAYS_S or self._game is None:
            self._game, self._since = newest, self._clock()

    def end(self, newest: Game | None) -> None:
        """Shows the newest game as a whole."""
        self._game, self._whole = newest, True

    def text(self) -> Text:
        """The game as far as it is shown."""
        if self._game is None:
            return Text()
        turns = list(self._game.turns())
        shown = turns if self._whole else turns[: int((self._clock() - self._since) / TURN_S) + 1]
        found = Text.assemble(("a game: ", "dim"), visible(f"hidden {self._game.hidden}"))
        for turn in shown:
            style = {"hit": "green", "missed": "red"}.get(turn.answer, "")
            found.append(" · ", "dim").append(visible(turn.guess.strip()) or "∅", "bold")
            found.append(visible(f" {turn.answer}"), style)
        return found
