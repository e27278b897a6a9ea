"""The progress of a run: a live view in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.run.progress import WINDOW, RunProgress, averaged, bounds
from headrace.terminal import LiveView, braille
from headrace.trainer.skipped import SkippedTotals

#: Columns of the view: as many as the terminal has, and no more than reads well.
MOST_WIDTH, LEAST_WIDTH = 100, 40
#: Lines of the curve; four dots each, so that a line is an eighth.
HEIGHT = 8
#: Where the curve's axis names a value, as shares of its height.
TICKS = (1.0, 0.75, 0.5, 0.25, 0.0)
#: Columns that the axis and its labels take, and the goal's label on the other side.
LEFT, RIGHT = 6, 5
#: Elsewhere than in a terminal, every so many steps are told.
TOLD_EVERY_STEPS = 10
#: Steps that the speed is taken over: fewer are mostly chance.
SPEED_STEPS = 2 * WINDOW


class RunView(LiveView):
    """Shows a run's progress. `clock` is in seconds. What a kind of run has beside the trainer's figures it adds by
    overriding `figures`, `below`, `seconds_left` and `learned`."""

    #: A reward that counts as learned; None where there is none.
    goal: float | None = None

    def __init__(
        self, console: Console, progress: RunProgress, steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console, auto_refresh=False)
        self.steps = steps
        self.clock = clock
        #: What the run does beside learning, as a phrase; empty: nothing.
        self.doing = ""
        self._progress = progress
        self._began = clock()
        self._told = 0

    def update(self) -> None:
        """Shows the current progress."""
        if self._live is not None:
            self._live.update(self.panel(), refresh=True)
            return
        done = len(self._progress.rows)
        if done // TOLD_EVERY_STEPS > self._told // TOLD_EVERY_STEPS or (done and not self._told):
            self._tell(done)

    def finish(self) -> None:
        """Shows the final state: the last step, and a full bar where the goal was reached."""
        if self._live is not None:
            self._live.update(self.panel(ended=True), refresh=True)
        elif len(self._progress.rows) > self._told:
            self._tell(len(self._progress.rows))

    def _tell(self, done: int) -> None:
        self._told = done
        told = [f"{name} {value}" for name, value in self.figures()]
        if not self.learned and (left := self._left()):
            told.append(left)
        said = filter(None, (", ".join(told), self._skipped()))
        self._console.print(f"step {done}: " + "; ".join(said), highlight=False, soft_wrap=True)

    # -- what it shows -------------------------------------------------------------------------------------------------

    @property
    def learned(self) -> bool:
        """Whether the goal was reached."""
        return False

    def figures(self) -> list[tuple[str, str]]:
        """The figures below the curve, each with its name."""
        rewards = self._progress.rewards
        row = self._progress.rows[-1] if self._progress.rows else {}
        shown = [
            ("reward", f"{averaged(rewards)[-1]:.3f}" if rewards else "-"),
            ("queue", f"{row.get('queue', 0)} groups"),
            ("staleness", f"{row.get('staleness_mean', 0):.2f}"),
            ("tokens/s", f"{row.get('tokens_s', 0):,.0f}"),
        ]
        if row.get("entropy") is not None:
            shown.insert(1, ("entropy", f"{row['entropy']:.2f}"))
        return shown

    def below(self) -> list[RenderableType]:
        """What is shown below the figures."""
        return [Text(self.doing, style="dim")] if self.doing else []

    def seconds_left(self) -> float | None:
        """Seconds until all steps are done at the pace of late; None while that is not known."""
        seconds = [row["seconds"] for row in self._progress.rows[-SPEED_STEPS:] if row.get("seconds") is not None]
        if len(seconds) < WINDOW:
            return None
        left: float = (self.steps - len(self._progress.rows)) * sum(seconds) / len(seconds)
        return left

    def _left(self) -> str:
        seconds = self.seconds_left()
        return f"about {duration(seconds)} left at this pace" if seconds is not None else ""

    def _skipped(self) -> str:
        """What the trainer did not learn from, with the reasons; empty where it learned from everything."""
        return SkippedTotals.of(self._progress.rows).sentence()

    def panel(self, *, ended: bool = False) -> Panel:
        """The live view; `ended`: as it stays when the run is over."""
        width = min(max(self._console.width, LEAST_WIDTH), MOST_WIDTH)
        inner = width - 4
        done, learned = len(self._progress.rows), self.learned
        full = ended and learned
        most = f"at most {self.steps}" if self.goal is not None else f"{self.steps}"
        where = f"learned in {done} steps" if full else f"step {done} of {most}"
        told = [where, f"{self.clock() - self._began:.0f} s", "" if ended or learned else self._left()]
        bar = Table.grid()
        bar.add_row(ProgressBar(total=1 if full else self.steps, completed=1 if full else done, width=inner))
        parts: list[RenderableType] = [
            bar,
            Text(" · ".join(filter(None, told))),
            Text(),
            *curve(averaged(self._progress.rewards), inner, self.goal),
            Text(),
            Text("   ").join(
                Text.assemble((f"{name}\N{NO-BREAK SPACE}", "dim"), (value.replace(" ", "\N{NO-BREAK SPACE}"), "bold"))
                for name, value in self.figures()
            ),
            *([Text(skipped, style="dim")] if (skipped := self._skipped()) else []),
            *self.below(),
        ]
        title = f"reward, mean of {WINDOW} steps"
        return Panel(Group(*parts), title=title, title_align="left", width=width, border_style="dim")


def curve(values: Sequence[float], width: int, goal: float | None = None) -> list[Text]:
    """The curve with its axes: rewards on the left, steps below, and a goal as a dotted line."""
    across = width - LEFT - RIGHT
    low, high = bounds(values)
    labels = {_row(tick): f"{low + tick * (high - low):.2f}" for tick in TICKS}
    goal_row = _row((goal - low) / (high - low)) if goal is not None else None
    shown = []
    for row, dots in enumerate(braille([(value - low) / (high - low) for value in values], across, HEIGHT)):
        label = labels.get(row)
        line = Text(f"{label:>4} ┤" if label else "     │", style="dim")
        for letter in dots:
            if letter != "\N{BRAILLE PATTERN BLANK}":
                line.append(letter, "bold cyan")
            else:
                line.append("╌" if row == goal_row else " ", "green")
        if row == goal_row:
            line.append(f" {goal:g}", "green")
        shown.append(line)
    return [*shown, *(Text(line, style="dim") for line in _steps_axis(len(values), across))]


def _row(share: float) -> int:
    """The line that a dot is drawn in, by its share of the height."""
    return min(int((1 - share) * 4 * HEIGHT), 4 * HEIGHT - 1) // 4


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


def duration(seconds: float) -> str:
    """A duration, as coarsely as it is estimated."""
    if seconds < 45:
        return f"{max(round(seconds / 10), 1) * 10} s"
    return "a minute" if seconds < 90 else f"{round(seconds / 60)} min"
