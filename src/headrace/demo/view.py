"""The progress of the demo: a live view in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.demo.games import Game
from headrace.demo.progress import DemoProgress, averaged
from headrace.demo.recipe import LEARNED_REWARD, LEARNED_STEPS
from headrace.terminal import braille

#: Columns of the view: as many as the terminal has, and no more than reads well.
MOST_WIDTH, LEAST_WIDTH = 100, 40
#: Lines of the curve; four dots each, so that a line is an eighth.
HEIGHT = 8
#: Rewards that the curve's axis names.
TICKS = (1.0, 0.75, 0.5, 0.25, 0.0)
#: Columns that the axis and its labels take, and the bar's label on the other side.
LEFT, RIGHT = 6, 5
#: Elsewhere than in a terminal, every so many steps are told.
TOLD_EVERY_STEPS = 10
#: Seconds that a rate is taken over.
RATE_S = 10.0
#: Seconds after which the next turn of a game is shown, and for which the whole game then stays.
TURN_S, STAYS_S = 0.5, 1.5


class DemoView:
    """Shows a run's progress. `clock` is in seconds."""

    def __init__(
        self, console: Console, progress: DemoProgress, steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._progress = progress
        self._steps = steps
        self._clock = clock
        self._began = clock()
        self._seen = deque([(self._began, progress.counters.calls)])
        self._told = 0
        self._replay = GameReplay(clock)
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> DemoView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Shows the current progress."""
        self._replay.show(self._progress.game)
        if self._live is not None:
            self._live.update(self.panel(), refresh=True)
            return
        done = len(self._progress.rows)
        if done // TOLD_EVERY_STEPS > self._told // TOLD_EVERY_STEPS or (done and not self._told):
            self._tell(done)

    def finish(self) -> None:
        """Shows the final state: the last step, the whole of the last game, and a full bar where the goal was
        reached."""
        self._replay.end(self._progress.game)
        if self._live is not None:
            self._live.update(self.panel(ended=True), refresh=True)
        elif len(self._progress.rows) > self._told:
            self._tell(len(self._progress.rows))

    def _tell(self, done: int) -> None:
        self._told = done
        told = [f"{name} {value}" for name, value in self._figures()]
        if not self._progress.learned and (left := self._left()):
            told.append(left)
        self._console.print(f"step {done}: " + ", ".join(told), highlight=False, soft_wrap=True)

    # -- figures -------------------------------------------------------------------------------------------------------

    def _figures(self) -> list[tuple[str, str]]:
        progress, rewards = self._progress, self._progress.rewards
        row = progress.rows[-1] if progress.rows else {}
        calls = progress.counters.calls
        shown = [
            ("reward", f"{averaged(rewards)[-1]:.3f}" if rewards else "-"),
            ("queue", f"{row.get('queue', 0)} groups"),
            ("staleness", f"{row.get('staleness_mean', 0):.2f}"),
            ("tokens/s", f"{row.get('tokens_s', 0):,.0f}"),
            ("calls", f"{calls:,}"),
            ("calls/s", f"{self._rate(calls):,.0f}"),
        ]
        if row.get("entropy") is not None:
            shown.insert(1, ("entropy", f"{row['entropy']:.2f}"))
        if progress.counters.given_up:
            shown.append(("given up", f"{progress.counters.given_up}"))
        return shown

    def _rate(self, calls: int) -> float:
        """Calls per second, over the last `RATE_S`."""
        now = self._clock()
        self._seen.append((now, calls))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_S:
            self._seen.popleft()
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return (after - before) / (last - first) if last > first else 0.0

    def _left(self) -> str:
        seconds = self._progress.seconds_left(self._steps)
        return f"about {rounded(seconds)} left at this pace" if seconds is not None else ""

    # -- the panel -----------------------------------------------------------------------------------------------------

    def panel(self, *, ended: bool = False) -> Panel:
        """The live view; `ended`: as it stays when the run is over."""
        width = min(max(self._console.width, LEAST_WIDTH), MOST_WIDTH)
        inner = width - 4
        done, learned = len(self._progress.rows), self._progress.learned
        full = ended and learned
        where = f"learned in {done} steps" if full else f"step {done} of at most {self._steps}"
        told = [where, f"{self._clock() - self._began:.0f} s", "" if ended or learned else self._left()]
        bar = Table.grid()
        bar.add_row(ProgressBar(total=1 if full else self._steps, completed=1 if full else done, width=inner))
        parts: list[RenderableType] = [
            bar,
            Text(" · ".join(filter(None, told))),
            Text(),
            *curve(averaged(self._progress.rewards), inner),
            Text(),
            Text("   ").join(
                Text.assemble((f"{name}\N{NO-BREAK SPACE}", "dim"), (value.replace(" ", "\N{NO-BREAK SPACE}"), "bold"))
                for name, value in self._figures()
            ),
            self._replay.text(),
        ]
        title = f"reward, mean of {LEARNED_STEPS} steps"
        return Panel(Group(*parts), title=title, title_align="left", width=width, border_style="dim")


def curve(values: list[float], width: int) -> list[Text]:
    """The curve with its axes: rewards on the left, steps below, and the goal as a dotted line."""
    across = width - LEFT - RIGHT
    labels = {_row(tick): f"{tick:.2f}" for tick in TICKS}
    shown = []
    for row, dots in enumerate(braille(values, across, HEIGHT)):
        label = labels.get(row)
        line = Text(f"{label:>4} ┤" if label else "     │", style="dim")
        for letter in dots:
            if letter != "\N{BRAILLE PATTERN BLANK}":
                line.append(letter, "bold cyan")
            else:
                line.append("╌" if row == _row(LEARNED_REWARD) else " ", "green")
        if row == _row(LEARNED_REWARD):
            line.append(f" {LEARNED_REWARD:g}", "green")
        shown.append(line)
    return [*shown, *(Text(line, style="dim") for line in _steps_axis(len(values), across))]


def _row(reward: float) -> int:
    """The line that a reward's dot is drawn in."""
    return min(int((1 - reward) * 4 * HEIGHT), 4 * HEIGHT - 1) // 4


def _steps_axis(steps: int, across: int) -> tuple[str, str]:
    """A line with ticks at round numbers of steps, and the numbers. A character is two steps wide until the width is
    full; then the steps are scaled to it."""
    span = max(steps, 2 * across)
    apart = next(n for n in (20, 50, 100, 200, 500, 1000, 2000, span) if span / n <= across / 8)
    line, numbers = ["─"] * across, [" "] * (across + LEFT)
    for step in range(apart, span + 1, apart):
        at = (step - 1) * across // span
        label = str(step)
        first = at - len(label) // 2
        if first + len(label) <= across:
            line[at] = "┴"
            numbers[first : first + len(label)] = label
    return " " * (LEFT - 1) + "└" + "".join(line), " " * LEFT + "".join(numbers).rstrip()


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
        found = Text.assemble(("a game: ", "dim"), f"hidden {self._game.hidden}")
        for turn in shown:
            style = {"hit": "green", "missed": "red"}.get(turn.answer, "")
            found.append(" · ", "dim").append(turn.guess.strip() or "∅", "bold").append(f" {turn.answer}", style)
        return found


def rounded(seconds: float) -> str:
    """A duration, as coarsely as it is estimated."""
    if seconds < 45:
        return f"{max(round(seconds / 10), 1) * 10} s"
    return "a minute" if seconds < 90 else f"{round(seconds / 60)} min"
