"""What one sees while the demo runs: a live view in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.braille import braille
from headrace.demo.progress import Progress, averaged
from headrace.demo.recipe import BAR

__all__ = ["View"]

WIDTH, HEIGHT = 60, 8
#: Elsewhere than in a terminal, every so many steps are told.
EVERY = 10
#: Seconds that a rate is taken over.
RATE_S = 10.0


class View:
    """Shows a run's progress. `say` tells what happens beside it."""

    def __init__(self, console: Console, progress: Progress, steps: int) -> None:
        self._console = console
        self._progress = progress
        self._steps = steps
        self._began = time.monotonic()
        self._seen = deque([(self._began, progress.counters.calls)])
        self._told = 0
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, words: str) -> None:
        self._console.print(words, highlight=False, soft_wrap=True)

    def update(self) -> None:
        """Shows what is there now."""
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            return
        done = len(self._progress.rows)
        if done // EVERY > self._told // EVERY or (done and not self._told):
            self._told = done
            self.say(f"step {done}: " + ", ".join(f"{name} {value}" for name, value in self._figures()))

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
        """Calls a second, of the last few seconds."""
        now = time.monotonic()
        self._seen.append((now, calls))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_S:
            self._seen.popleft()
        (first, before), (last, after) = self._seen[0], self._seen[-1]
        return (after - before) / (last - first) if last > first else 0.0

    def _panel(self) -> Panel:
        done = len(self._progress.rows)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=self._steps, completed=done, width=WIDTH),
            Text(f"step {done} of at most {self._steps}"),
            Text(f"{time.monotonic() - self._began:.0f} s"),
        )
        figures = Table.grid(padding=(0, 2))
        found = self._figures()
        figures.add_row(*(Text(name, style="dim") for name, _ in found))
        figures.add_row(*(Text(value, style="bold") for _, value in found))
        curve = Table.grid(padding=(0, 1))
        lines = braille(averaged(self._progress.rewards), WIDTH, HEIGHT)
        labels = [""] * HEIGHT
        labels[0], labels[-1] = "1.0", "0.0"
        for label, line in zip(labels, lines, strict=True):
            curve.add_row(Text(label, style="dim"), Text(line, style="cyan"))
        title = f"reward, mean of ten steps; learned at {BAR}"
        return Panel(Group(bar, curve, figures), title=title, title_align="left", width=WIDTH + 40, border_style="dim")
