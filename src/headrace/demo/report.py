"""What is left of a run: a picture of its curve, and one page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import orjson

from headrace.demo.agents import GAMES
from headrace.demo.chart import chart, svg, write_png
from headrace.demo.progress import Progress

__all__ = ["write_report"]

PAGE, PICTURE = "report.html", "reward.png"
#: Games that are shown of the first ones, and of the last ones.
SHOWN = 6
TIMES = {
    "wait": "waiting for games",
    "learn": "learning",
    "publish": "publishing weights",
    "checkpoint": "writing checkpoints",
}

STYLE = """
body { font: 16px/1.5 sans-serif; color: #1f2933; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top }
th { color: #7b8794; font-weight: normal } .number { text-align: right }
.bar { background: #1769aa; height: .8rem } .games { display: flex; gap: 3rem; flex-wrap: wrap }
.win { color: #2f855a } .loss { color: #b83232 } pre { background: #f5f7fa; padding: 1rem; overflow: auto }
"""


def write_report(
    run: Path, progress: Progress, verdict: Mapping[str, Any], cpu_s: Mapping[str, float], config: str
) -> Path:
    """Writes both into the run's folder and returns the page's path."""
    marks = chart(progress.rewards, f"{verdict['task']}: reward by training step, and the mean of ten")
    write_png(marks, run / PICTURE)
    games = [orjson.loads(line) for line in (run / GAMES).read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]
    times = {words: sum(row.get("times", {}).get(name, 0.0) for row in progress.rows) for name, words in TIMES.items()}
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Headrace demo</title><style>{STYLE}</style>",
        f"<h1>Headrace demo: {escape(str(verdict['task']))}</h1>",
        svg(marks),
        _facts(verdict),
        "<h2>Games</h2><div class=games>",
        _games("before", games[:SHOWN]),
        _games("after", games[-SHOWN:]),
        "</div>",
        "<h2>Where the time went</h2>",
        _bars("seconds of CPU by process", cpu_s),
        _bars("seconds of the trainer's loop", times),
        f"<h2>The trainer's configuration</h2><pre>{escape(config)}</pre></html>",
    ]
    (run / PAGE).write_text("\n".join(parts))
    return run / PAGE


def _facts(verdict: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in verdict.items() if name not in ("task", "report")}
    rows = (f"<tr><th>{name.replace('_', ' ')}<td>{_number(value)}" for name, value in shown.items())
    return f"<table>{''.join(rows)}</table>"


def _games(when: str, games: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for game in games:
        said = [message["content"] for message in game["messages"][1:]]
        turns = " ".join(f"<b>{escape(text) or '∅'}</b>" if n % 2 == 0 else escape(text) for n, text in enumerate(said))
        won = game["reward"] == 1.0
        end = "<span class=win>hit</span>" if won else "<span class=loss>missed</span>"
        rows.append(f"<tr><td class=number>{game['hidden']}<td>{turns}<td>{end}")
    return f"<table><tr><th>hidden<th>{when}: guesses in bold<th></tr>{''.join(rows)}</table>"


def _bars(what: str, values: Mapping[str, float]) -> str:
    most = max([*values.values(), 1e-9])
    rows = (
        f"<tr><td>{escape(name)}<td class=number>{value:.1f}"
        f"<td><div class=bar style='width:{20 * value / most:.2f}rem'></div>"
        for name, value in values.items()
    )
    return f"<table><tr><th>{what}<th><th></tr>{''.join(rows)}</table>"


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
