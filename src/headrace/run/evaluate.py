"""Evaluations beside a run (`Evaluations`), and `headrace run --evaluate`: the held-out data played with a checkpoint.

Both start what plays as a process (`headrace.run.evaluation`) and read the file that it leaves.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import orjson
import yaml
from rich.console import Console
from rich.table import Table

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.processes import Child, ChildDied, Processes
from headrace.run.config import RunConfig
from headrace.run.plan import plan
from headrace.run.results import EvaluationResult, write
from headrace.run.services import EVALUATIONS, LOGS, TRAINER, RunPlan
from headrace.run.stack import Stack, StartLog, reserved_ports, until

#: The services of a run that sample and score; what learns and what plays is left out.
SERVING = ("engine", "pool", "gateway", "reward")
#: The file of `--evaluate`, in the run's folder.
RESULT_FILE = "evaluation.json"


class Evaluations:
    """Plays the held-out data beside a run, one evaluation at a time, each a process of its own."""

    def __init__(self, config: RunConfig, base: Path, run: Path, planned: RunPlan, processes: Processes) -> None:
        self._config, self._base, self._run = config, base, run
        self._planned, self._processes = planned, processes
        self._child: Child | None = None
        self._step = -1
        #: Whether there is held-out data to play.
        self.wanted = config.data is not None and config.data.val is not None
        #: Whether it is to be played before anything is learned.
        self.due_first = self.wanted and not self._file(0).exists()

    def begin(self, step: int, **options: Any) -> None:
        """Starts the evaluation that stands for a step; `options` are fields of `EvaluationConfig` that differ."""
        assert self._config.data is not None
        self._step = step
        into = self._file(step)
        config = {
            "base": str(self._base),
            "gateway": self._planned.gateway,
            "pool": self._planned.pool,
            "model": self._config.model,
            "data": self._config.data.model_dump(mode="json", exclude_defaults=True),
            "agent": self._config.agent.model_dump(mode="json", exclude_defaults=True),
            # Another name each time: an evaluation that was killed has left trajectories behind.
            "name": f"evaluation-{step}-{time.time_ns():x}",
            "into": str(into),
            "step": step,
            "concurrency": self._config.rollout.concurrency,
            "by": self._config.evaluate.by,
            "pass_reward": self._config.evaluate.pass_reward,
            **options,
        }
        file = self._run / "evaluation.yaml"
        file.write_text(yaml.safe_dump(config, sort_keys=False))
        self._child = self._processes.start("evaluation", "headrace.run.evaluation", file)

    def follow(self, step: int) -> None:
        """Starts the evaluation that is due after so many steps, where none runs."""
        every = self._config.evaluate.every
        if self.wanted and every and step and self.is_over() and step // every > max(self._step, 0) // every:
            self.begin(step)

    def is_over(self) -> bool:
        """Whether none runs. Raises `ChildDied` where the last one failed."""
        if self._child is None:
            return True
        code = self._child.code()
        if code is None:
            return False
        child, self._child = self._child, None
        self._processes.end(child)
        if code:
            child.check()
        return True

    @property
    def doing(self) -> str:
        """What is played now, as a phrase; empty: nothing."""
        return f"held-out data is played, after step {self._step}" if self._child is not None else ""

    def result(self, step: int) -> EvaluationResult:
        """What the evaluation of a step came to."""
        return msgspec.json.decode(self._file(step).read_bytes(), type=EvaluationResult)

    def told(self, step: int) -> str:
        """The same in words."""
        found = self.result(step)
        mean = f"{found.mean:.3f}" if found.mean is not None else "unknown"
        failed = f", {found.failed} of {found.rollouts} failed" if found.failed else ""
        return f"score {mean} over {found.rollouts} rollouts of {found.rows} rows{failed}"

    def _file(self, step: int) -> Path:
        return self._run / EVALUATIONS / f"step-{step}.json"


def played(config: RunConfig, base: Path, log: StartLog, *, step: int = 0, **options: Any) -> EvaluationResult:
    """Starts what serves and scores, without a trainer, plays the held-out data and ends it all. `options` are other
    fields of `EvaluationConfig`. Raises `HeadraceError`, with the end of its log, where a process dies."""
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="headrace-run-")))
        (folder / LOGS).mkdir()
        ports = ending.enter_context(reserved_ports(config.servers.started, config.gateway.port, config.host))
        planned = plan(config, base, folder, ports)
        planned.write(folder)
        processes = ending.enter_context(Processes(folder / LOGS))
        serving = [service for service in planned.services if service.name.partition("-")[0] in SERVING]
        stack = Stack(serving, processes, log.tell)
        evaluations = Evaluations(config, base, folder, planned, processes)
        try:
            with log.console.status("starting", spinner_style="dim"):
                until(stack, lambda: not stack.waiting_for)
                evaluations.begin(step, **options)
                until(stack, evaluations.is_over)
        except ChildDied as error:
            raise HeadraceError(f"{error}:\n{error.tail}") from None
        return evaluations.result(step)


def checkpoint(run: Path | None) -> Path | None:
    """The newest checkpoint of a run; None where it has none."""
    found = sorted((run / TRAINER / "checkpoints").glob("[0-9]*")) if run is not None else []
    return found[-1] if found else None


def evaluate_run(
    file: Path, config: RunConfig, run: Path | None, *, by: Sequence[str] = (), console: Console | None = None
) -> EvaluationResult:
    """Plays the held-out data with a run's newest checkpoint, or with the file's model where there is no run; prints a
    table and, as the last line, JSON. Raises `InvalidInput` where there is no such data."""
    if config.data is None or config.data.val is None:
        raise InvalidInput(f"--evaluate plays data.val, and {file} names none; add rows that are not trained on")
    val = config.data.val
    log = StartLog(console or Console())
    found = checkpoint(run)
    if found is not None:
        config = config.model_copy(update={"model": str(found)})
    log.say(f"Headrace: {val} is played with {config.model}")
    columns = list(dict.fromkeys([*config.evaluate.by, *by]))
    step = int(found.name) if found is not None else 0
    result = msgspec.structs.replace(
        played(config, file.absolute().parent, log, by=columns, step=step), name=Path(config.model).name
    )
    log.console.print(table(result))
    if run is not None and run.exists():
        write(result, run / RESULT_FILE)
    told = msgspec.to_builtins(msgspec.structs.replace(result, played=[]), str_keys=True)
    told.pop("played")
    print(orjson.dumps({**told, "model": config.model}).decode(), flush=True)
    return result


def table(result: EvaluationResult) -> Table:
    """The result as a table: all rows, then each value of the columns that were asked for."""
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "mean", *(f"pass@{k}" for k in result.pass_at), "rollouts", "failed"):
        grid.add_column(name, justify="left" if not name else "right")
    mean = f"{result.mean:.3f}" if result.mean is not None else "-"
    rates = [f"{rate:.3f}" for rate in result.pass_at.values()]
    grid.add_row("all", mean, *rates, str(result.rollouts), str(result.failed))
    for column, values in result.by.items():
        for value, found in values.items():
            grid.add_row(f"{column} {value}", f"{found:.3f}")
    return grid
