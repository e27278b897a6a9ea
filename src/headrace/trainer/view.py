"""The progress of a training run: a live view in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.data.visible import VisibleFormatter, visible
from headrace.terminal import LiveView, figure_table, labelled_curve
from headrace.trainer.checkpoint import Progress
from headrace.trainer.config import TrainerConfig
from headrace.trainer.reporting import AWAITING_BATCH, RunWatcher
from headrace.trainer.skipped import SkippedTotals

#: Characters: the curve's width and height, and the panel's width.
WIDTH, HEIGHT, PANEL = 60, 6, 100
#: Redraws per second of the live view, so that its seconds are seen to count.
FRAMES_PER_S = 4
#: Elsewhere than in a terminal, every so many steps are told, and at least one in so many seconds.
TOLD_EVERY_STEPS, TOLD_EVERY_S = 10, 60.0
#: Seconds that a batch may be waited for before that is told in a line; and between two such lines.
BATCH_WAIT_TOLD_AFTER_S, BATCH_WAIT_TOLD_EVERY_S = 5.0, 60.0


class TrainView(RunWatcher, LiveView):
    """Shows a run. As a context manager it also shows the log: above the live view, or on stderr."""

    def __init__(self, console: Console, config: TrainerConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        RunWatcher.__init__(self)
        self._config, self._clock = config, clock
        self._lock = threading.Lock()
        self._began = self._since = clock()
        self._done = 0
        self._row: dict[str, Any] = {}
        self._recent: deque[float] = deque(maxlen=config.stop_window)
        self._curve: list[float] = []
        self._skipped = SkippedTotals()
        self._told_step, self._told_at = 0, clock()
        self._told_groups, self._told_groups_at = "", 0.0
        self._stopping = ""
        LiveView.__init__(self, console, get_renderable=self._panel, refresh_per_second=FRAMES_PER_S)
        self._logs: logging.Handler = _Above(self) if self._live is not None else logging.StreamHandler()
        self._logs.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def __enter__(self) -> Self:
        root = logging.getLogger()
        self._level = root.level
        root.setLevel(logging.INFO)
        root.addHandler(self._logs)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        root = logging.getLogger()
        root.removeHandler(self._logs)
        root.setLevel(self._level)

    def say(self, words: str) -> None:
        """Prints a line, above the live view where there is one."""
        self._console.print(visible(words, lines=True), markup=False, highlight=False, soft_wrap=True)

    # -- what it is told -----------------------------------------------------------------------------------------------

    def ready(self, progress: Progress) -> None:
        self._done = progress.step
        self.say(f"trainer ready at step {progress.step}, version {progress.version}")

    def doing(self, words: str) -> None:
        super().doing(words)
        self._since, self._told_groups = self._clock(), ""

    def groups(self, words: str) -> None:
        super().groups(words)
        now = self._clock()
        if self._live is not None or self._doing != AWAITING_BATCH or now - self._since < BATCH_WAIT_TOLD_AFTER_S:
            return
        with self._lock:
            if words == self._told_groups or (
                self._told_groups and now - self._told_groups_at < BATCH_WAIT_TOLD_EVERY_S
            ):
                return
            self._told_groups, self._told_groups_at = words, now
        self.say(self.standing)

    def step(self, row: dict[str, Any]) -> None:
        super().step(row)
        self._row, self._done = row, row["step"]
        self._skipped.add(row)
        if row["reward"] is not None:
            self._recent.append(row["reward"])
            self._curve.append(sum(self._recent) / len(self._recent))
        if self._live is None and (
            not self._told_step
            or self._done - self._told_step >= TOLD_EVERY_STEPS
            or self._done == self._config.steps
            or self._clock() - self._told_at >= TOLD_EVERY_S
        ):
            self._told_step, self._told_at = self._done, self._clock()
            figures = ", ".join(f"{name} {value}" for name, value in self._figures())
            said = filter(None, (figures, self._skipped.sentence()))
            self.say(f"step {self._done} of at most {self._config.steps}: {'; '.join(said)}")

    def stopping(self, by: str) -> None:
        self._stopping = f"stopping ({by}): after the step under way; Ctrl-C again does not wait for it"
        if self._live is None:
            self.say(f"stopping ({by}), while {self.standing}")

    def ending_at_once(self) -> None:
        if self._live is not None:
            self._console.show_cursor(True)  # the terminal as it was; there is no time to stop the live view

    # -- what it shows -------------------------------------------------------------------------------------------------

    def _figures(self) -> list[tuple[str, str]]:
        row = self._row
        if not row:
            return []
        times = row["times"]
        shown = [("reward", f"{self._curve[-1]:.3f}" if self._curve else "-")]
        if row["reward"] is None and row.get("loss") is not None:
            shown = [("loss", f"{row['loss']:.3f}")]  # nothing is rewarded, as where trajectories are imitated
        if row.get("entropy") is not None:
            shown.append(("entropy", f"{row['entropy']:.2f}"))
        shown += [
            ("staleness", f"{row['staleness_mean']:.2f}"),
            ("tokens/s", f"{row['tokens_s']:,.0f}"),
            ("queue", f"{row['queue']} groups"),
            ("step", f"{row['seconds']:.2f} s"),
            ("of which wait", f"{times.get('wait', 0):.2f} s"),
            ("learn", f"{times.get('learn', 0):.2f} s"),
            ("publish", f"{times.get('publish', 0):.2f} s"),
        ]
        return shown

    def _panel(self) -> Panel:
        config = self._config
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=config.steps, completed=self._done, width=WIDTH),
            Text(f"step {self._done} of at most {config.steps}"),
            Text(f"{self._clock() - self._began:.0f} s"),
        )
        standing = Text(self.standing, style="" if self._doing.startswith("learning") else "yellow", overflow="fold")
        if not self._down:
            standing.append(f" ({self._clock() - self._since:.0f} s)", style="dim")
        parts: list[Any] = [bar, standing]
        if self._stopping:
            parts.append(Text(self._stopping, style="bold yellow"))
        if self._curve:
            parts.append(self._drawn())
        parts += self._tables()
        if self._skipped:
            parts.append(Text(self._skipped.sentence(), style="dim"))
        goal = "" if config.stop_at_reward is None else f"; ends at {config.stop_at_reward:g}"
        title = f"headrace train: reward, mean of {config.stop_window} steps{goal}"
        width = min(PANEL, self._console.width)
        return Panel(Group(*parts), title=title, title_align="left", width=width, border_style="dim")

    def _drawn(self) -> Table:
        """The reward curve, from 0 to 1 or as far beyond as it goes."""
        return labelled_curve(self._curve, min(0.0, *self._curve), max(1.0, *self._curve), WIDTH, HEIGHT)

    def _tables(self) -> list[Table]:
        """The figures, five in a row."""
        found = self._figures()
        return [figure_table(found[begin : begin + 5]) for begin in range(0, len(found), 5)]


class _Above(logging.Handler):
    """Shows log lines above the live view."""

    def __init__(self, view: TrainView) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._view.say(self.format(record))
        except Exception:  # as every handler does: a log line never ends the program
            self.handleError(record)
