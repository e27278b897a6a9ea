"""Evaluations beside a run (`Evaluations`), and `headrace run --evaluate`: the held-out data played with a checkpoint.

Both start what plays as a process and read what it leaves: `headrace.run.evaluation` plays rows of data, and an
environment evaluates itself (`headrace env FILE evaluate`).
"""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.visible import visible
from headrace.processes import Child, ChildDied, Processes
from headrace.run.config import RunConfig
from headrace.run.environment import (
    PlayedGroup,
    environment_command,
    evaluate_file,
    group_file,
    read_evaluation,
    read_group,
)
from headrace.run.plan import plan
from headrace.run.results import EvaluationResult, write
from headrace.run.services import EVALUATIONS, LOGS, TRAINER, RunPlan, key_variables
from headrace.run.stack import Stack, StartLog, reserved_ports, until
from headrace.trainer.sync.weights import ADAPTER_FILE

#: The services of a run that sample and score; what learns and what plays is left out.
SERVING = ("engine", "pool", "gateway", "reward")
#: The file of `--evaluate`, in the run's folder.
RESULT_FILE = "evaluation.json"
#: The file of a step's evaluation, among the run's evaluations. It is whole: until then it has another name.
STEP_FILE = re.compile(r"step-(\d+)\.json")


class Evaluations:
    """Plays the held-out data beside a run, one evaluation at a time, each a process of its own.

    A resumed run goes on after the last evaluation of what its newest checkpoint has learned: later ones were of
    weights that are lost, and are played again as they are due.
    """

    def __init__(self, config: RunConfig, base: Path, run: Path, planned: RunPlan, processes: Processes) -> None:
        self._config, self._base, self._run = config, base, run
        self._planned, self._processes = planned, processes
        self._child: Child | None = None
        learned = _step_of(checkpoint(run))
        #: The step whose evaluation was begun last; -1: none was.
        self._step = max((step for step in _evaluated(run / EVALUATIONS) if step <= learned), default=-1)
        #: Fields of the result that the next evaluation is asked for.
        self._by: Sequence[str] = config.evaluate.by
        #: Whether there is held-out data to play; an environment is to be asked, as not every one has much to say.
        self.wanted = config.data.val is not None if config.data is not None else config.evaluate.every > 0
        #: Whether it is to be played before anything is learned; it is too late for that once there is a checkpoint.
        self.due_first = self.wanted and not learned and not self._file(0).exists()

    def begin(self, step: int, **options: Any) -> None:
        """Starts the evaluation that stands for a step; `options` are fields of `EvaluationConfig` that differ, of
        which an environment knows `by` alone."""
        self._step = step
        if self._config.data is None:
            self._begin_environment(**options)
            return
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
            "sampling": self._config.evaluate.sampling.model_dump(exclude_none=True),
            **options,
        }
        file = self._run / "evaluation.yaml"
        file.write_text(yaml.safe_dump(config, sort_keys=False))
        self._child = self._processes.start("evaluation", "headrace.run.evaluation", file, env=key_variables())

    def _begin_environment(self, by: Sequence[str] | None = None) -> None:
        self._by = self._config.evaluate.by if by is None else by
        planned, run = self._planned, self._run
        file = run / "evaluation.yaml"
        told = evaluate_file(self._config, planned.gateway, planned.servers, run, self._folder(self._step))
        file.write_text(yaml.safe_dump(told, sort_keys=False))
        command = environment_command(self._config, "evaluate", file)
        self._child = self._processes.start_program("evaluation", command, env=key_variables(), folder=self._base)

    def follow(self, step: int) -> None:
        """Starts the evaluation that is due after so many steps, where none runs. The last step's is not begun here:
        it is played once the trainer has ended."""
        every, last = self._config.evaluate.every, self._config.train.steps
        if not (self.wanted and every and 0 < step < last):
            return
        if self.is_over() and step // every > max(self._step, 0) // every:
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
        if self._config.data is None:
            step, wanted = self._step, self._config.evaluate.pass_reward
            name = f"evaluation-{step}"
            found = read_evaluation(self._folder(step), name, step, pass_reward=wanted, by=self._by)
            write(found, self._file(step))
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
        if not found.rollouts:
            return f"score {mean}, by the environment's own metrics: {named(found.metrics)}"
        failed = f", {found.failed} of {found.rollouts} failed" if found.failed else ""
        return f"score {mean} over {found.rollouts} rollouts of {found.rows} rows{failed}"

    def _file(self, step: int) -> Path:
        return self._run / EVALUATIONS / f"step-{step}.json"

    def _folder(self, step: int) -> Path:
        """Where an environment leaves the files of its evaluation."""
        return self._run / EVALUATIONS / f"step-{step}"


@dataclass(frozen=True, slots=True)
class Serving:
    """The part of a run that serves and scores, started in a folder that goes with it."""

    folder: Path
    planned: RunPlan
    processes: Processes
    stack: Stack


@contextmanager
def serving(config: RunConfig, base: Path, log: StartLog) -> Iterator[Serving]:
    """Starts what serves and scores, without a trainer and without whoever plays; ends it with the block. Raises
    `HeadraceError`, with the end of its log, where one of its processes dies, in the block too."""
    if config.where != "local":  # the folder is a temporary one of this machine
        config = config.model_copy(update={"where": config.where.beside()})
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="headrace-run-")))
        (folder / LOGS).mkdir()
        ports = ending.enter_context(reserved_ports(config.servers.started, config.gateway.port, config.host))
        planned = plan(config, base, folder, ports)
        planned.write(folder)
        processes = ending.enter_context(Processes(folder / LOGS))
        services = [service for service in planned.services if service.name.partition("-")[0] in SERVING]
        stack = Stack(services, processes, log.tell)
        try:
            with log.console.status("starting", spinner_style="dim"):
                until(stack, lambda: not stack.waiting_for)
                yield Serving(folder, planned, processes, stack)
        except ChildDied as error:
            raise HeadraceError(f"{error}:\n{error.tail}") from None


def played(config: RunConfig, base: Path, log: StartLog, *, step: int = 0, **options: Any) -> EvaluationResult:
    """Starts what serves and scores, plays the held-out data, or has an environment evaluate itself, and ends it all.
    `options` are other fields of `EvaluationConfig`. Raises `HeadraceError` where a process dies."""
    with serving(config, base, log) as there:
        evaluations = Evaluations(config, base, there.folder, there.planned, there.processes)
        evaluations.begin(step, **options)
        until(there.stack, evaluations.is_over)
        return evaluations.result(step)


def played_group(config: RunConfig, base: Path, log: StartLog) -> PlayedGroup:
    """The same for one group of an environment: it plays an item and scores its rollouts."""
    with serving(config, base, log) as there:
        groups, file = there.folder / "groups.jsonl", there.folder / "process.yaml"
        planned, processes = there.planned, there.processes
        told = group_file(config, planned.gateway, planned.servers, there.folder, groups)
        file.write_text(yaml.safe_dump(told, sort_keys=False))
        command = environment_command(config, "process", file)
        child = processes.start_program("environment", command, env=key_variables(), folder=base)
        until(there.stack, lambda: child.code() is not None)
        if child.code():
            child.check()
        return read_group(groups)


def checkpoint(run: Path | None) -> Path | None:
    """The newest checkpoint of a run; None where it has none."""
    found = sorted((run / TRAINER / "checkpoints").glob("[0-9]*")) if run is not None else []
    return found[-1] if found else None


def _step_of(found: Path | None) -> int:
    """The training step of a checkpoint; 0 where there is none."""
    return int(found.name) if found is not None else 0


def _evaluated(evaluations: Path) -> list[int]:
    """The steps whose evaluations have a result in a folder, which need not be there."""
    return [int(named[1]) for path in evaluations.glob("*") if (named := STEP_FILE.fullmatch(path.name))]


def evaluate_run(
    file: Path, config: RunConfig, run: Path | None, *, by: Sequence[str] = (), console: Console | None = None
) -> EvaluationResult:
    """Plays the held-out data with a run's newest checkpoint, or with the file's model where there is no run, or has
    the environment evaluate that; prints a table and, as the last line, JSON. Raises `InvalidInput` where there is no
    such data, or the checkpoint is an adapter."""
    if config.data is not None and config.data.val is None:
        raise InvalidInput(f"--evaluate plays data.val, and {file} names none; add rows that are not trained on")
    log = StartLog(console or Console())
    found = checkpoint(run)
    if found is not None:
        if (found / ADAPTER_FILE).exists():
            raise InvalidInput(
                f"{found} is a LoRA adapter, which no server loads as its model; merge it into {config.model} (peft's "
                "merge_and_unload), save that as a folder with its tokenizer, and evaluate it with: "
                f"headrace run {shlex.quote(str(file))} --evaluate --set model=FOLDER --run-dir NEW_FOLDER"
            )
        config = config.model_copy(update={"model": str(found)})
    if config.data is not None:
        log.say(f"Headrace: {config.data.val} is played with {config.model}")
    else:
        log.say(f"Headrace: {config.agent.env} evaluates {config.model}")
    columns = list(dict.fromkeys([*config.evaluate.by, *by]))
    result = msgspec.structs.replace(
        played(config, file.absolute().parent, log, by=columns, step=_step_of(found)), name=Path(config.model).name
    )
    log.console.print(table(result))
    for line in untold(result, columns):
        log.say(line)
    if run is not None and run.exists():
        write(result, run / RESULT_FILE)
    told = msgspec.to_builtins(msgspec.structs.replace(result, played=[]), str_keys=True)
    told.pop("played")
    if config.data is not None:
        told.pop("metrics")
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
            grid.add_row(Text(visible(f"{column} {value}")), f"{found:.3f}")
    for name, metric in result.metrics.items():
        grid.add_row(Text(visible(name)), f"{metric:.3f}")
    return grid


def untold(result: EvaluationResult, columns: Sequence[str] = ()) -> list[str]:
    """What cannot be told of a result, a line each: what was played says too little."""
    found = []
    if result.mean is None:
        said = named(result.metrics) if result.metrics else "none"
        found.append(f"The mean cannot be told: no rollout has a score, and no metric is named as one ({said})")
    if not result.pass_at:
        found.append("pass@k cannot be told: the evaluation gives no score of each item (a `score` in its samples)")
    lacking = [column for column in columns if column not in result.by]
    if lacking:
        found.append(f"By {', '.join(lacking)} nothing can be told: no sample that has a score has such a field")
    return found


def named(metrics: Mapping[str, float]) -> str:
    """Metrics in a line."""
    return ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
