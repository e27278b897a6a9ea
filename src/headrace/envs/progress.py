"""The progress of a running environment: a live view on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.envs.core import EnvCore
from headrace.envs.metrics import Counts
from headrace.terminal import LiveView, figure_table, labelled_curve

#: Characters of the bar and the curve.
WIDTH, HEIGHT = 60, 6
#: Seconds between two lines where there is no terminal.
LINE_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class ProgressState:
    """What the view shows at one moment."""

    done: int
    total: int
    #: What `done` and `total` count: groups, steps. An unknown total is negative.
    unit: str
    #: Mean scores, oldest first.
    scores: Sequence[float] = ()
    figures: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.done} of {self.total} {self.unit}" if self.total >= 0 else f"{self.done} {self.unit}"


class ProgressView(LiveView):
    """Shows the state. On a terminal every update is drawn; elsewhere one is printed every `LINE_INTERVAL_S`, where
    something has changed, and the last.
    """

    def __init__(self, console: Console, title: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, auto_refresh=False)
        self._title = title
        self._clock = clock
        self._began = clock()
        self._told_at = -LINE_INTERVAL_S
        self._told = self._last = ""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        if self._live is None and self._last != self._told:
            self._tell()

    def update(self, standing: ProgressState) -> None:
        """Shows this progress: at once on a terminal, elsewhere as a line where it is time for one."""
        if self._live is not None:
            self._live.update(self._panel(standing), refresh=True)
            return
        shown = "".join(f", {name} {value}" for name, value in standing.figures.items())
        self._last = f"{self._title}: {standing}{shown}"
        if self._last != self._told and self._clock() - self._told_at >= LINE_INTERVAL_S:
            self._tell()

    def _tell(self) -> None:
        self._told, self._told_at = self._last, self._clock()
        self._console.print(self._last, highlight=False, markup=False, soft_wrap=True)

    def _panel(self, standing: ProgressState) -> Panel:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=max(standing.total, 1), completed=standing.done, width=WIDTH),
            Text(str(standing)),
            Text(f"{self._clock() - self._began:.0f} s", style="dim"),
        )
        figures, title = figure_table(standing.figures.items()), self._title
        shown = Group(bar, figures)
        if len(scores := standing.scores) > 1:
            shown = Group(bar, labelled_curve(scores, min(scores), max(scores), WIDTH, HEIGHT), figures)
            title = f"{title}: mean score"
        return Panel(shown, title=Text(title), title_align="left", border_style="dim", expand=False)


#: Seconds between two updates: smooth to watch, and cheap.
UPDATE_S = 0.25
#: Updates with new scores that the shown mean is taken over.
MEAN_UPDATES = 20
#: Updates with new scores that the curve shows.
CURVE_UPDATES = 240


class Scores:
    """Mean scores of the sequences that came in between two updates."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._sequences, self._sum = 0, 0.0
        self.means: deque[float] = deque(maxlen=CURVE_UPDATES)

    def update(self) -> None:
        """Adds the mean of the sequences since the last update, where there are any."""
        new = self._counts.sequences - self._sequences
        if new:
            self.means.append((self._counts.scores - self._sum) / new)
            self._sequences, self._sum = self._counts.sequences, self._counts.scores

    @property
    def recent(self) -> str:
        """The mean of the latest updates as text; a dash before the first."""
        last = list(self.means)[-MEAN_UPDATES:]
        return f"{sum(last) / len(last):.3f}" if last else "-"


def progress_of(env: EnvCore, scores: Scores, total: int, unit: str) -> ProgressState:
    """An environment's progress now."""
    counts = env.counts
    figures = {"score": scores.recent}
    if unit != "groups":
        figures["groups"] = f"{counts.groups:,}"
    if "queue_size" in env.status_dict:
        figures["queue"] = f"{env.status_dict['queue_size']} groups"
    figures["workers"] = f"{len(env.workers)} of {env.max_num_workers}"
    if env.manager is not None and env.manager.held:
        figures["held"] = "for the trainer"
    for name, found in (("skipped", counts.skipped), ("failed", counts.failed)):
        if found:
            why = ", ".join(f"{times:,} {reason}" for reason, times in found.most_common())
            figures[name] = f"{found.total():,} ({why})" if len(found) > 1 else why
    return ProgressState(env.curr_step, total, unit, list(scores.means), figures)


@asynccontextmanager
async def watched(env: EnvCore, unit: str, console: Console) -> AsyncIterator[None]:
    """Shows the environment's progress on the console meanwhile."""
    scores = Scores(env.counts)

    def update(view: ProgressView) -> None:
        scores.update()
        view.update(progress_of(env, scores, env.config.total_steps, unit))

    async def updating(view: ProgressView) -> None:
        while True:
            update(view)
            await asyncio.sleep(UPDATE_S)

    with ProgressView(console, env.name or type(env).__name__) as view:
        task = asyncio.create_task(updating(view), name="view")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            update(view)
