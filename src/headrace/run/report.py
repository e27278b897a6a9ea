"""The report of a run: what it says of itself, a picture of its reward curve, and its dashboard as one HTML file.

What every kind of run says (figures, where the time went, where to look) is made of the functions here; a kind with
more to tell, such as the demo, puts its own sections between them.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.dashboard.about import About, AboutSection, AboutTable, Cell, write_about
from headrace.run.chart import ChartMark, chart, write_png
from headrace.run.progress import METRICS, RunProgress, reward_text
from headrace.run.results import EvaluationResult
from headrace.run.services import EVALUATIONS, JOURNAL, LOGS, TRAINER, TRAINER_FILE, headrace

log = logging.getLogger("headrace.run")

PAGE, PICTURE = "report.html", "reward.png"
#: The parts of the trainer's loop, by their names in its metrics.
TIMES = {
    "wait": "waiting for rollouts",
    "learn": "learning",
    "publish": "publishing weights",
    "checkpoint": "writing checkpoints",
}


def write_pages(run: Path, about: About, marks: Sequence[ChartMark]) -> Path:
    """Writes what a run says of itself, the picture and the page into its folder; returns the page's path.

    The page is the dashboard's export, made by the command that makes it again. Where that fails, it is logged, and the
    run's result stands all the same.
    """
    write_png(marks, run / PICTURE)
    write_about(run, about)
    page = run / PAGE
    done = subprocess.run(headrace("dashboard", run, "--export", page), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        log.error("%s was not written: %s", page, done.stderr.strip() or f"exit code {done.returncode}")
    return page


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
    start, end = (reward_text(verdict[name]) for name in ("reward_start", "reward_end"))
    about = About(
        title,
        f"{verdict['steps']} steps in {verdict['seconds']:.0f} s: the reward went from {start} to {end}.",
        [
            facts(verdict),
            *_held_out(evaluations),
            times(progress, cpu_s),
            places(
                run,
                f"headrace pool stats {quoted(run / JOURNAL)}",
                "headrace run --resume",
                {EVALUATIONS: ("each rollout on held-out data, with its reward", "")},
            ),
            AboutSection("The run's file", code=file),
            trainer_configuration(run),
        ],
    )
    return write_pages(run, about, marks)


def _held_out(evaluations: Sequence[EvaluationResult]) -> list[AboutSection]:
    if not evaluations:
        return []
    ks = sorted({k for one in evaluations for k in one.pass_at})
    columns = ["step", "mean", *(f"pass@{k}" for k in ks), "rollouts", "failed"]
    rows: list[list[Cell]] = [
        [one.step, one.mean, *(one.pass_at.get(k) for k in ks), one.rollouts, one.failed] for one in evaluations
    ]
    return [AboutSection("On held-out data", tables=[AboutTable(columns, rows)])]


def facts(verdict: Mapping[str, Any], leave_out: Sequence[str] = ("report",)) -> AboutSection:
    """A result's figures."""
    rows: list[list[Cell]] = [
        [name.replace("_", " "), value] for name, value in verdict.items() if name not in leave_out
    ]
    return AboutSection("Result", tables=[AboutTable(["", ""], rows)])


def times(progress: RunProgress, cpu_s: Mapping[str, float]) -> AboutSection:
    """Where the time went: by process, and in the trainer's loop, over all steps."""
    loop = {words: sum(row.get("times", {}).get(name, 0.0) for row in progress.rows) for name, words in TIMES.items()}
    return AboutSection(
        "Where the time went",
        tables=[_seconds("seconds of CPU by process", cpu_s), _seconds("seconds of the trainer's loop", loop)],
    )


def _seconds(what: str, values: Mapping[str, float]) -> AboutTable:
    return AboutTable([what, ""], [[name, round(value, 1)] for name, value in values.items()], bars=True)


def places(run: Path, look: str, resume: str, more: Mapping[str, tuple[str, str]]) -> AboutSection:
    """Where to look in a run's folder: by path, what is there and the command that reads it. What is not there is left
    out. `look` reads the journal, `resume` goes on with the run; `more` is what this kind of run has besides."""
    found = {
        JOURNAL: ("the pool: what was recorded, and what became of it", look),
        LOGS: ("what each process said", ""),
        f"{TRAINER}/{METRICS}": ("one line a step, with everything that was measured", ""),
        TRAINER: ("checkpoints, from which a run goes on", resume),
        **more,
    }
    rows: list[list[Cell]] = [
        [name, words, command] for name, (words, command) in found.items() if (run / name).exists()
    ]
    return AboutSection(
        "Where to look",
        [f"Everything of this run is in {run}; headrace dashboard {quoted(run)} serves this page again."],
        [AboutTable(["", "what is there", "what reads it"], rows)],
    )


def trainer_configuration(run: Path) -> AboutSection:
    """The file with which the trainer was started."""
    return AboutSection("The trainer's configuration", code=(run / TRAINER_FILE).read_text())


def quoted(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))
