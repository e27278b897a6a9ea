"""One run: starts its processes, watches them until the trainer has made its steps, ends them and reports.

Everything that happens in between is in files below the run's folder, which this module reads: the trainer's metrics,
the results of evaluations, the processes' logs.
"""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import orjson
import yaml
from rich.console import Console

from headrace.data.errors import HeadraceError
from headrace.processes import ChildDied, Processes
from headrace.run import folder
from headrace.run.config import RunConfig
from headrace.run.evaluate import Evaluations
from headrace.run.plan import plan
from headrace.run.progress import RunProgress, reward_text, rounded
from headrace.run.report import write_report
from headrace.run.results import EvaluationResult, read_results
from headrace.run.services import EVALUATIONS, LOGS, TRAINER, RunPlan
from headrace.run.stack import Stack, StartLog, reserved_ports, run_stack, starting, until
from headrace.run.view import RunView


class TrainingRun:
    """A run in its folder: `learn` does all of it, `verdict` says what it came to."""

    def __init__(self, config: RunConfig, base: Path, run: Path, console: Console) -> None:
        self.config = config
        self.base = base
        self.run = run
        self.log = StartLog(console)
        self.progress = RunProgress(run / TRAINER)
        self.cpu_s: dict[str, float] = {}
        self.restarts: dict[str, int] = {}

    def learn(self, *, resume: bool) -> None:
        """Starts all processes, waits until the trainer has ended by itself, evaluates before and after where there is
        held-out data, and ends them. Raises `ChildDied`, with everything ended."""
        with ExitStack() as ending:
            held = ending.enter_context(folder.locked(self.run))
            ports = ending.enter_context(
                reserved_ports(self.config.servers.started, self.config.gateway.port, self.config.host)
            )
            planned = plan(self.config, self.base, self.run, ports, resume=resume)
            planned.write(self.run)
            processes = ending.enter_context(Processes(self.run / LOGS, held=[held]))
            try:
                self._watch(planned, processes)
            except KeyboardInterrupt:
                self.log.say("Stopping: the trainer ends its step and keeps a checkpoint (Ctrl-C again: at once)")
                raise
            processes.end_all()
            self.cpu_s = processes.cpu_s

    def _watch(self, planned: RunPlan, processes: Processes) -> None:
        stack = run_stack(planned, processes, self.log)
        player = planned.services[-1].name
        evaluations = Evaluations(self.config, self.base, self.run, planned, processes)
        self.restarts = stack.restarts
        if evaluations.due_first:
            stack.hold(player)
        starting(stack, self.log)
        if evaluations.due_first:
            self._evaluate(stack, evaluations, 0, "is played before anything is learned")
            stack.release(player)
        with RunView(self.log.console, self.progress, self.config.train.steps) as view:

            def learning() -> None:
                if self.progress.refresh() or self.log.console.is_terminal:
                    view.update()
                evaluations.follow(len(self.progress.rows))
                view.doing = evaluations.doing

            until(stack, lambda: stack.has_ended("trainer"), learning)
            self.progress.refresh()
            view.finish()
        stack.end(player)
        if evaluations.wanted:
            until(stack, evaluations.is_over)
            self._evaluate(stack, evaluations, len(self.progress.rows), "is played with what was learned")

    def _evaluate(self, stack: Stack, evaluations: Evaluations, step: int, words: str) -> None:
        self.log.tell("held-out", words)
        evaluations.begin(step)
        until(stack, evaluations.is_over)
        self.log.tell("held-out", evaluations.told(step))

    def verdict(self, seconds: float) -> dict[str, Any]:
        """The result: the JSON object of the last line, but for the report."""
        progress = self.progress
        found: dict[str, Any] = {
            "reward_start": rounded(progress.reward_start),
            "reward_end": rounded(progress.reward_end),
            "steps": len(progress.rows),
            "seconds": round(seconds, 1),
        }
        if held_out := self.held_out():
            first, last = held_out[0], held_out[-1]
            untrained = first.mean if first.step == 0 else None  # a resumed run may have begun to evaluate later
            found |= {"held_out_start": rounded(untrained), "held_out_end": rounded(last.mean)}
        return found | {
            "staleness_mean": rounded(progress.mean("staleness_mean")),
            "logprob_gap_max": progress.most("logprob_gap_max"),
            "restarts": sum(self.restarts.values()),
        }

    def held_out(self) -> list[EvaluationResult]:
        """The evaluations of this run, by their steps."""
        return read_results(self.run / EVALUATIONS)


def execute(file: Path, config: RunConfig, run: Path, *, resume: bool = False, console: Console | None = None) -> bool:
    """Runs a file and prints its result, one JSON object, as the last line. Returns whether something was learned.

    Where it is interrupted or one of its processes cannot be kept up, the others are ended, and the message names the
    command that resumes it.
    """
    began = time.monotonic()
    console = console or Console()
    base, run = file.absolute().parent, run.absolute()
    dumped = config.model_dump(mode="json")
    kept = folder.resume(run, dumped) if resume else folder.begin(run, dumped)
    training = TrainingRun(config, base, run, console)
    going_on = resuming(file, run)
    training.log.say(f"Headrace: {_shown(file)}; the run is {_shown(run)}")
    ended = 0
    try:
        training.learn(resume=resume)
        ended = len(training.progress.rows)
    except ChildDied as error:
        if error.tail:
            training.log.say(error.tail)
        raise HeadraceError(f"{error} (its log is in {run / LOGS}); go on with: {going_on}") from None
    except KeyboardInterrupt:
        training.log.say(f"Stopped after {len(training.progress.rows)} steps. Go on with: {going_on}")
        raise
    finally:
        seconds = kept.seconds + time.monotonic() - began
        if (run / folder.STATE_FILE).exists():
            msgspec.structs.replace(kept, seconds=round(seconds, 1), ended=ended).write(run)
    verdict = training.verdict(seconds)
    training.log.say("The report is being written")
    page = write_report(
        *(run, f"Headrace run: {file.absolute().parent.name}", training.progress, verdict, training.held_out()),
        *(training.cpu_s, yaml.safe_dump(dumped, sort_keys=False)),
    )
    learned = any(row["tokens"] for row in training.progress.rows)
    for line in _closing(verdict, page, run, learned=learned):
        training.log.say(line)
    sys.stdout.flush()
    print(orjson.dumps({**verdict, "report": str(page)}).decode(), flush=True)  # not rich's: it would be wrapped
    return learned


def _closing(verdict: dict[str, Any], page: Path, run: Path, *, learned: bool) -> list[str]:
    """Lines that tell the result and where to read about it."""
    start, end = (reward_text(verdict[name]) for name in ("reward_start", "reward_end"))
    if not learned:
        first = f"Nothing was learned in {verdict['steps']} steps; why is in {_shown(run / LOGS / 'trainer.log')}"
    else:
        took = f"{verdict['steps']} steps in {verdict['seconds']:.0f} s"
        first = f"{took}: reward {start} at the start, {end} at the end"
    return [
        first,
        f"Report:      {_shown(page)}",
        f"Checkpoints: {_shown(run / TRAINER / 'checkpoints')}",
        f"Look:        headrace dashboard {shlex.quote(_shown(run))} opens the dashboard again",
    ]


def resuming(file: Path, run: Path) -> str:
    """The command that resumes a run."""
    return f"headrace run {shlex.quote(_shown(file))} --resume --run-dir {shlex.quote(_shown(run))}"


def _shown(path: Path) -> str:
    """A path relative to the current folder where it is below it."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
