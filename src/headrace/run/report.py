"""The report of a run: a picture of its reward curve, and one self-contained HTML page.

What every kind of run shows (the curve, figures, where the time went, where to look) is made of the functions here; a
kind with more to tell, such as the demo, puts its own parts between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from headrace.run.chart import ChartMark, chart, svg, write_png
from headrace.run.progress import METRICS, RunProgress
from headrace.run.results import EvaluationResult
from headrace.run.services import EVALUATIONS, JOURNAL, LOGS, TRAINER, TRAINER_FILE

PAGE, PICTURE = "report.html", "reward.png"
#: The parts of the trainer's loop, by their names in its metrics.
TIMES = {
    "wait": "waiting for rollouts",
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
code { background: #f5f7fa; padding: 0 .2rem } .note { color: #7b8794 } summary { cursor: pointer }
.call { display: flex; flex-wrap: wrap; gap: .25rem; margin: .5rem 0; align-items: stretch }
.token { background: #f5f7fa; border-radius: .2rem; padding: .1rem .4rem; text-align: center; font: 14px/1.4 monospace }
.token small { display: block; color: #7b8794; font-size: 11px }
.sampled { background: #1769aa; color: #ffffff } .sampled small { color: #d9e8f5 }
"""


def write_page(run: Path, title: str, marks: Sequence[ChartMark], parts: Iterable[str]) -> Path:
    """Writes the picture, and the page of these parts, into the run's folder; returns the page's path."""
    write_png(marks, run / PICTURE)
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{STYLE}</style>"
    (run / PAGE).write_text("\n".join([head, f"<h1>{escape(title)}</h1>", *parts, "</html>"]))
    return run / PAGE


def write_report(
    run: Path,
    title: str,
    progress: RunProgress,
    verdict: Mapping[str, Any],
    evaluations: Sequence[EvaluationResult],
    cpu_s: Mapping[str, float],
    file: str,
) -> Path:
    """Writes the page and the picture of a run; `file` is the text of its run.yaml. Returns the page's path."""
    held_out = [(one.step, one.mean) for one in evaluations if one.mean is not None]
    marks = chart(progress.rewards, "reward by training step, and the mean of 10", held_out=held_out)
    start, end = (f"{v:.3f}" if v is not None else "-" for v in (verdict["reward_start"], verdict["reward_end"]))
    parts = [
        f"<p>{verdict['steps']} steps in {verdict['seconds']:.0f} s: the reward went from {start} to {end}.",
        svg(marks),
        facts(verdict),
        *_held_out(evaluations),
        "<h2>Where the time went</h2>",
        bars("seconds of CPU by process", cpu_s),
        bars("seconds of the trainer's loop", loop_times(progress)),
        "<h2>Where to look</h2>",
        places(
            run,
            {
                JOURNAL: f"the pool: what was recorded, and what became of it; <code>headrace pool stats "
                f"{escape(str(run / JOURNAL))}</code>",
                LOGS: "what each process said",
                f"{TRAINER}/{METRICS}": "one line a step, with everything that was measured",
                TRAINER: "checkpoints, which <code>headrace run --resume</code> goes on from",
                EVALUATIONS: "each rollout on held-out data, with its reward",
            },
        ),
        "<h2>The run's file</h2>",
        f"<pre>{escape(file)}</pre>",
        "<h2>The trainer's configuration</h2>",
        f"<pre>{escape((run / TRAINER_FILE).read_text())}</pre>",
    ]
    return write_page(run, title, marks, parts)


def _held_out(evaluations: Sequence[EvaluationResult]) -> list[str]:
    if not evaluations:
        return []
    ks = sorted({k for one in evaluations for k in one.pass_at})
    head = "".join(f"<th>{name}" for name in ("step", "mean", *(f"pass@{k}" for k in ks), "rollouts", "failed"))
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td class=number>{number(value)}"
            for value in (one.step, one.mean, *(one.pass_at.get(k) for k in ks), one.rollouts, one.failed)
        )
        for one in evaluations
    )
    return ["<h2>On held-out data</h2>", f"<table><tr>{head}</tr>{rows}</table>"]


def facts(verdict: Mapping[str, Any], leave_out: Sequence[str] = ("report",)) -> str:
    """A table of a result's figures."""
    shown = {name: value for name, value in verdict.items() if name not in leave_out}
    rows = (f"<tr><th>{name.replace('_', ' ')}<td>{number(value)}" for name, value in shown.items())
    return f"<table>{''.join(rows)}</table>"


def loop_times(progress: RunProgress) -> dict[str, float]:
    """The seconds of each part of the trainer's loop, over all steps."""
    return {words: sum(row.get("times", {}).get(name, 0.0) for row in progress.rows) for name, words in TIMES.items()}


def bars(what: str, values: Mapping[str, float]) -> str:
    """A table of values with a bar for each."""
    most = max([*values.values(), 1e-9])
    rows = (
        f"<tr><td>{escape(name)}<td class=number>{value:.1f}"
        f"<td><div class=bar style='width:{20 * value / most:.2f}rem'></div>"
        for name, value in values.items()
    )
    return f"<table><tr><th>{what}<th><th></tr>{''.join(rows)}</table>"


def places(run: Path, found: Mapping[str, str]) -> str:
    """Where to look in a run's folder: by path, what is there, as HTML. What is not there is left out."""
    rows = "".join(
        f"<tr><td><a href='{name}'>{name}</a><td>{words}" for name, words in found.items() if (run / name).exists()
    )
    return f"<p>Everything of this run is in <code>{escape(str(run))}</code>.<table>{rows}</table>"


def number(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
