"""One run of the demo: starts its processes, watches them until the agents have learned, ends them and reports.

The engine serves a model with random weights, the gateway records what the agents do into a journalled pool, and the
trainer learns from it and publishes its weights. This module reads the files that they write.
"""

from __future__ import annotations

import shlex
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import orjson
from rich.console import Console

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.demo.progress import DemoProgress, GameRecords
from headrace.demo.recipe import LEARNED_REWARD, LEARNED_STEPS, RECIPES
from headrace.demo.report import write_report
from headrace.demo.services import ACTOR, DemoSettings, channel, demo_plan
from headrace.demo.tasks import TASKS
from headrace.demo.view import DemoView
from headrace.files import read_json, write_whole
from headrace.processes import ChildDied, Processes
from headrace.run import folder
from headrace.run.progress import averaged, rounded
from headrace.run.ray_pool import RayPool, ray_pool
from headrace.run.services import JOURNAL, LOGS
from headrace.run.stack import Stack, StartLog, reserved_ports, run_stack, starting, until

STATE_FILE = "demo.json"
#: The task where none is given.
DEFAULT_TASK = "number"
#: What a resumed run may be told anew: how far to go, and where its servers are by now.
CHANGEABLE = ("steps", "vllm_addresses")


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run. None: not given; a new run takes the default, a resumed one keeps what it has."""

    task: str | None = None
    seed: int | None = None
    #: Most steps; by default the recipe's.
    steps: int | None = None
    engine: str | None = None
    vllm_addresses: str | None = None
    model: str | None = None
    sync_mode: str | None = None
    ray: bool | None = None

    def said(self) -> dict[str, Any]:
        """The options that were given, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


class DemoState(msgspec.Struct, frozen=True):
    """The file in a run's folder from which it is resumed."""

    settings: DemoSettings
    #: How long it took so far.
    seconds: float = 0.0
    #: The steps after which its trainer ended by itself; 0 while it has not.
    ended: int = 0

    def write(self, run: Path) -> None:
        """Writes the file into the run's folder, whole or not at all."""
        write_whole(run / STATE_FILE, orjson.dumps(msgspec.to_builtins(self), option=orjson.OPT_INDENT_2))


def play(options: DemoOptions, run: Path, *, resume: bool = False, console: Console | None = None) -> bool:
    """Runs the demo and prints its result, one JSON object, as the last line. Returns whether the agents have learned.

    Where it is interrupted or one of its processes dies, the others are ended, and the message names the command that
    resumes it.
    """
    began = time.monotonic()
    run = run.absolute()
    kept = _resumed(options, run) if resume else _begun(options, run)
    console = console or Console()
    demo = DemoRun(kept.settings, run, console)
    ended = 0
    try:
        demo.learn(resume=resume)
        ended = len(demo.progress.rows)
    except ChildDied as error:
        if error.tail:
            demo.say(error.tail)
        raise HeadraceError(f"{error} (its log is in {run / 'logs'}); go on with: {resuming(run)}") from None
    except KeyboardInterrupt:
        demo.say(f"Stopped after {len(demo.progress.rows)} steps. Go on with: {resuming(run)}")
        raise
    finally:
        seconds = kept.seconds + time.monotonic() - began
        DemoState(kept.settings, round(seconds, 1), ended).write(run)
    verdict = demo.verdict(seconds)
    demo.say("The report is being written")
    page = write_report(run, kept.settings, demo.progress, verdict, demo.cpu_s, demo.recorded.games)
    for line in demo.closing(verdict, page):
        demo.say(line)
    print(orjson.dumps({**verdict, "report": str(page)}).decode(), flush=True)  # not rich's: it would be wrapped
    return demo.progress.learned


class DemoRun:
    """The processes of one run, and their results."""

    def __init__(self, settled: DemoSettings, run: Path, console: Console) -> None:
        self.settled = settled
        self.run = run
        self.console = console
        self.log = StartLog(console)
        self.progress = DemoProgress(run, run / "trainer")
        self.recorded = GameRecords(run, settled.seed)
        self.cpu_s: dict[str, float] = {}

    def say(self, words: str) -> None:
        """Prints a line on the console."""
        self.log.say(words)

    def learn(self, *, resume: bool) -> None:
        """Starts all processes, waits until the goal is reached or all steps are done, and ends them. Raises
        `ChildDied`."""
        settled, run = self.settled, self.run
        with ExitStack() as ending:
            self.say(f"Headrace: agents learn the task {settled.task!r}; the run is {_shown(run)}")
            held = ending.enter_context(folder.locked(run))
            # It ends last: the others still need it.
            pool = self._ray_pool(ending) if settled.ray else None
            ports = ending.enter_context(reserved_ports(0 if settled.vllm_addresses else 1))
            planned = demo_plan(settled, self._model(), run, ports, pool, resume=resume)
            planned.write(run)
            processes = ending.enter_context(Processes(run / LOGS, held=[held]))
            try:
                stack = run_stack(planned, processes, self.log)
                self._watch(stack, planned.pool)
            except KeyboardInterrupt:
                self.say("Stopping: the trainer ends its step and keeps a checkpoint (Ctrl-C again: at once)")
                raise
            stack.end("agents")
            self.recorded.keep_last(planned.pool)
            processes.end_all()
            self.cpu_s = processes.cpu_s

    def _watch(self, stack: Stack, pool: str) -> None:
        """Shows the progress until the trainer has stopped by itself, at the goal or after all steps."""
        starting(stack, self.log)
        with DemoView(self.console, self.progress, self.settled.steps) as view:

            def learning() -> None:
                if self.progress.refresh() or self.console.is_terminal:
                    view.update()
                self.recorded.keep_first(pool)

            until(stack, lambda: stack.has_ended("trainer"), learning)
            self.progress.refresh()
            view.finish()

    def _model(self) -> Path:
        if self.settled.model is not None:
            return Path(self.settled.model)
        from headrace.demo.model import build

        found = build(self.run / "model", self.settled.seed)
        self.log.tell("model", f"random weights of seed {self.settled.seed}")
        return found

    def verdict(self, seconds: float) -> dict[str, Any]:
        """The result: the JSON object of the demo's last line."""
        progress = self.progress
        curve = averaged(progress.rewards)
        return {
            "task": self.settled.task,
            "steps": len(progress.rows),
            "reward_start": rounded(progress.rewards[0] if curve else None),
            "reward_end": rounded(curve[-1] if curve else None),
            "seconds": round(seconds, 1),
            "calls": progress.counters.calls,
            "staleness_mean": rounded(progress.mean("staleness_mean")),
            "logprob_gap_max": progress.most("logprob_gap_max"),
        }

    def closing(self, verdict: dict[str, Any], page: Path) -> list[str]:
        """Lines that tell the result, where to read about it, and what to try next."""
        steps, most, reward = verdict["steps"], self.settled.steps, verdict["reward_end"] or 0.0
        look = [
            f"Report:   {_shown(page)}",
            f"Look:     headrace dashboard {shlex.quote(_shown(self.run))} opens the dashboard again",
        ]
        if self.progress.learned:
            return [
                f"Learned: reward {reward:.3f}, the mean of {LEARNED_STEPS} steps, after {steps} steps and "
                f"{verdict['seconds']:.0f} s.",
                *look,
                f"Try next: headrace demo --seed {self.settled.seed + 1}, with other weights and numbers",
                f"          headrace pool stats {shlex.quote(_shown(self.run / 'journal'))}, what was recorded",
                "          an agent of your own: docs/agents.md",
            ]
        if steps < most:
            ended, going_on = f"The trainer ended after {steps} of {most} steps", resuming(self.run)
        else:
            ended, going_on = f"{steps} steps were not enough", resuming(self.run, more_steps(self.settled, steps))
        return [f"{ended}: reward {reward:.2f} of {LEARNED_REWARD}; go on with: {going_on}", *look]

    def _ray_pool(self, ending: ExitStack) -> RayPool:
        self.say("The pool is an actor of a Ray cluster, which is started first")
        return ending.enter_context(ray_pool(ACTOR, self.run / JOURNAL, {"train": channel(self.settled.recipe)}))


def resuming(run: Path, steps: int | None = None) -> str:
    """The command that resumes a run."""
    return f"headrace demo --resume --run {shlex.quote(_shown(run))}" + (f" --steps {steps}" if steps else "")


def more_steps(settled: DemoSettings, steps: int) -> int:
    """How many steps to suggest where so many were not enough: the recipe's, or twice as many."""
    return settled.recipe.steps if settled.recipe.steps > steps else 2 * steps


def _begun(options: DemoOptions, run: Path) -> DemoState:
    """A new run in an empty folder, with its settings written to it."""
    if run.exists() and any(run.iterdir()):
        raise InvalidInput(f"--run {run} is not empty; go on with --resume, or name another folder")
    said = options.said()
    task = said.setdefault("task", DEFAULT_TASK)
    if task not in TASKS:
        raise InvalidInput(f"--task {task!r} is not known; there are {', '.join(TASKS)}")
    settled = DemoSettings(**{"recipe": RECIPES[task], "steps": RECIPES[task].steps, **said})
    if (settled.engine == "vllm") != (settled.vllm_addresses is not None):
        raise InvalidInput("--engine vllm and --vllm-addresses go together: the demo starts no vLLM, it uses yours")
    if settled.engine == "vllm" and settled.model is None:
        raise InvalidInput(
            "--engine vllm needs --model: the folder of the checkpoint that your vLLM serves "
            "(python -m headrace.demo.model FOLDER writes one)"
        )
    (run / "logs").mkdir(parents=True, exist_ok=True)
    kept = DemoState(settled)
    kept.write(run)
    return kept


def _resumed(options: DemoOptions, run: Path) -> DemoState:
    """The run in a folder, with as many steps as are asked for. Raises where other options differ from those it began
    with."""
    if not (run / STATE_FILE).exists():
        raise InvalidInput(f"--resume: {run} holds no demo; without --resume one would begin there")
    kept = read_json(run / STATE_FILE, DemoState)
    said, has = options.said(), msgspec.structs.asdict(kept.settings)
    other = [name for name, value in said.items() if name not in CHANGEABLE and value != has[name]]
    if other:
        flags = {name: "--" + name.replace("_", "-") for name in other}
        raise InvalidInput(
            "--resume: "
            + ", ".join(f"the run has {_valued(flags[name], has[name])}, not {said[name]}" for name in other)
            + f"; go on with it as it is ({resuming(run)}), or begin another without --resume"
        )
    settled = msgspec.structs.replace(kept.settings, **{name: said[name] for name in CHANGEABLE if name in said})
    progress = DemoProgress(run, run / "trainer")
    progress.refresh()
    if kept.ended and settled.steps <= kept.ended and not progress.learned:
        raise InvalidInput(
            f"--resume: the run has made its {kept.ended} steps; go on with: "
            f"{resuming(run, more_steps(settled, kept.ended))}"
        )
    return DemoState(settled, kept.seconds)


def _valued(flag: str, value: Any) -> str:
    return f"no {flag}" if value is None or value is False else f"{flag} {value}"


def _shown(path: Path) -> str:
    """A path relative to the current folder where it is below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
