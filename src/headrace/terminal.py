"""What live views in a terminal share: their beginning and end, curves drawn with braille characters, and figures
below their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text


class LiveView:
    """Base of views that are drawn in a terminal while they are entered. Elsewhere `_live` is None: such a view prints
    lines.

    `options` are those of rich's `Live`, which asks a `get_renderable` among them for its first frame at once.
    """

    def __init__(self, console: Console, **options: Any) -> None:
        self._console = console
        self._live = Live(console=console, **options) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()


def braille(values: Sequence[float], width: int, height: int) -> list[str]:
    """A curve of values between 0 and 1 as `height` lines of `width` braille characters, each two dots by four. Fewer
    values than dots leave the right end empty; of more, evenly spaced ones are drawn."""
    dots = [(0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80)]
    cells = [[0] * width for _ in range(height)]
    columns, rows = 2 * width, 4 * height
    for x in range(columns if values else 0):
        if len(values) > columns:
            value = values[x * len(values) // columns]
        elif x < len(values):
            value = values[x]
        else:
            break
        y = min(int((1 - min(max(value, 0.0), 1.0)) * rows), rows - 1)
        cells[y // 4][x // 2] |= dots[x % 2][y % 4]
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def labelled_curve(values: Sequence[float], low: float, high: float, width: int, height: int) -> Table:
    """A curve between `low` and `high`, with both beside it; in the middle where they are equal."""
    span = high - low
    lines = braille([(value - low) / span if span > 0 else 0.5 for value in values], width, height)
    labels = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"]
    grid = Table.grid(padding=(0, 1))
    for label, line in zip(labels, lines, strict=True):
        grid.add_row(Text(label, style="dim"), Text(line, style="cyan"))
    return grid


def figure_table(figures: Iterable[tuple[str, str]]) -> Table:
    """Figures beside each other, each below its name."""
    shown = list(figures)
    grid = Table.grid(padding=(0, 2))
    grid.add_row(*(Text(name, style="dim") for name, _ in shown))
    grid.add_row(*(Text(value, style="bold") for _, value in shown))
    return grid
