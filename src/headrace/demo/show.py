"""Telling what happens: a picture that changes on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.demo.score import Score

TITLE = "Headrace: the pool at work. No training yet: the trainer comes later"
BAR = 40


class Show:
    def __init__(self, console: Console, score: Score) -> None:
        self._console = console
        self._score = score
        self._said: list[str] = []
        self._ledgers: list[tuple[str, dict[str, Any]]] = []
        self._live: Live | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        if not self._console.is_terminal:
            self._print(TITLE)
            yield
            return
        with Live(get_renderable=self._picture, console=self._console, refresh_per_second=10) as self._live:
            yield

    def say(self, text: str) -> None:
        self._said.append(text)
        if self._live is None:
            self._print(text)

    def ledger(self, title: str, ledger: dict[str, Any]) -> None:
        """The ledger at one moment; on a terminal the moments stand below each other."""
        self._ledgers.append((title, ledger))
        if self._live is None:
            self._print(f"  ledger {title}: {', '.join(f'{count} {name}' for name, count in ledger.items())}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        score = self._score
        filled = BAR * score.groups // score.wanted
        won = f"{score.hits / score.games:.0%}" if score.games else "-"
        now = Text.assemble(
            ("█" * filled, "cyan"),
            ("░" * (BAR - filled), "dim"),
            f" {score.groups} of {score.wanted} groups consumed\n",
            f"{score.games} games played, {len(score.acknowledged)} steps acknowledged, {won} won, at random\n",
        )
        parts: list[RenderableType] = [now, Text("\n".join(self._said), style="dim")]
        if self._ledgers:
            parts.append(self._table())
        return Panel(Group(*parts), title=TITLE, border_style="cyan")

    def _table(self) -> Table:
        table = Table(
            box=None, padding=(0, 2), header_style="bold", title="\nthe ledger, in steps", title_justify="left"
        )
        table.add_column("")
        names = list(self._ledgers[0][1])
        for name in names:
            table.add_column(name, justify="right")
        for title, ledger in self._ledgers:
            table.add_row(title, *(str(ledger[name]) for name in names))
        return table
