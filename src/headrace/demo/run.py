"""One run of the demo: Headrace's own commands put together, watched until the agents have learned, and told of.

The engine serves a model with random weights, the gateway records what the agents do into a journalled pool, and the
trainer learns from it and publishes its weights. They know each other by address only; this module starts them, looks
at the files that they write, and ends them.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import orjson
import yaml
from rich.console import Console

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.demo.progress import Progress, averaged
from headrace.demo.recipe import RECIPES, Recipe, trainer_config
from headrace.demo.report import write_report
from headrace.demo.tasks import TASKS
from headrace.demo.view import View
from headrace.processes import Child, ChildDied, Processes

__all__ = ["Options", "play"]

SETTINGS = "demo.json"
#: Seconds between two looks at the run.
LOOK_S = 0.25
#: Seconds after which a group that a crash left incomplete is dropped, and counted as such.
ABANDONED_S = 60
ACTOR = "headrace-demo"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is told."""

    task: str = "number"
    seed: int = 0
    #: Most steps; 0: the recipe's.
    steps: int = 0
    engine: str = "headrace"
    vllm_addresses: str | None = None
    model: str | None = None
    sync_mode: str = "auto"
    ray: bool = False


class Settled(Options, frozen=True, kw_only=True):
    """What a run goes by from its first start on."""

    recipe: Recipe


def play(options: Options, run: Path, *, resume: bool = False, console: Console | None = None) -> bool:
    """Runs the demo and prints its verdict, one JSON object, as the last line. True where the agents have learned."""
    began = time.monotonic()
    run = run.absolute()
    settled, earlier_s = _settled(options, run, resume=resume)
    console = console or Console()
    demo = Demo(settled, run, console)
    try:
        demo.learn(resume=resume)
    except ChildDied as error:
        if error.tail:
            console.print(error.tail, markup=False, highlight=False, soft_wrap=True)
        raise HeadraceError(
            f"{error} (its log is in {run / 'logs'}); go on with: headrace demo --resume --run {run}"
        ) from None
    finally:
        seconds = earlier_s + time.monotonic() - began
        _keep(run, settled, seconds)
    verdict = demo.verdict(seconds)
    config = (run / "trainer.yaml").read_text()
    verdict["report"] = str(write_report(run, demo.progress, verdict, demo.cpu_s, config))
    print(orjson.dumps(verdict).decode(), flush=True)
    return demo.progress.learned


class Demo:
    """The processes of one run, and what they have come to."""

    def __init__(self, settled: Settled, run: Path, console: Console) -> None:
        self.options = settled
        self.run = run
        self.console = console
        self.progress = Progress(run, run / "trainer")
        self.cpu_s: dict[str, float] = {}

    def learn(self, *, resume: bool) -> None:
        """Starts everything, waits until the bar is reached or all steps are done, and ends everything."""
        view = View(self.console, self.progress, self.options.steps)
        with ExitStack() as ending:
            self.console.print(f"Headrace: agents learn the task {self.options.task!r}; the run is {self.run}")
            model = self._model()
            # It ends last: the others still need it.
            pool, cluster = self._ray_pool(ending) if self.options.ray else (None, None)
            processes = ending.enter_context(Processes(self.run / "logs"))
            servers = self._servers(processes, model)
            gateway = self._gateway(processes, model, servers, cluster)
            trainer = self._trainer(processes, model, gateway, pool or gateway, resume=resume)
            trainer.ready("trainer")  # the servers have the run's weights: a restarted engine has others
            agents = self._agents(processes, gateway)
            with view:
                while trainer.code() != 0:  # it stops by itself, at the bar or after all steps
                    processes.check()
                    time.sleep(LOOK_S)
                    if self.progress.refresh() or self.console.is_terminal:
                        view.update()
            for child in (agents, trainer):
                processes.end(child)
            self.progress.refresh()
            for child in reversed(processes.children):
                processes.end(child)
            self.cpu_s = processes.cpu_s

    def verdict(self, seconds: float) -> dict[str, Any]:
        progress = self.progress
        curve = averaged(progress.rewards)
        return {
            "task": self.options.task,
            "steps": len(progress.rows),
            "reward_start": _rounded(progress.rewards[0] if curve else None),
            "reward_end": _rounded(curve[-1] if curve else None),
            "seconds": round(seconds, 1),
            "calls": progress.counters.calls,
            "staleness_mean": _rounded(progress.mean("staleness_mean")),
            "logprob_gap_max": progress.most("logprob_gap_max"),
        }

    # -- the parts -----------------------------------------------------------------------------------------------------

    def _model(self) -> Path:
        if self.options.model is not None:
            return Path(self.options.model)
        from transformers.utils import logging

        from headrace.demo.model import build

        logging.disable_progress_bar()
        return build(self.run / "model", self.options.seed)

    def _servers(self, processes: Processes, model: Path) -> str:
        if self.options.engine == "vllm":
            assert self.options.vllm_addresses is not None
            return self.options.vllm_addresses
        engine = processes.start(
            "engine", "headrace", "engine", "--model", model, "--port", 0, "--seed", self.options.seed
        )
        return engine.ready("engine")

    def _gateway(self, processes: Processes, model: Path, servers: str, cluster: str | None) -> str:
        given = ["--vllm-addresses", servers, "--tokenizer-path", model, "--host", "127.0.0.1", "--port", 0, "--open"]
        if cluster is None:
            given = ["serve", *given, "--journal", self.run / "journal", "--durability", "os"]
            given += ["--channel", f"train:n_rollouts={self.options.recipe.rollouts},group_timeout_s={ABANDONED_S}"]
        else:
            given = ["gateway", *given, "--data-pool-name", ACTOR, "--ray-address", cluster]
            given += ["--prompt-length", 64, "--response-length", 16]
        gateway = processes.start("gateway", "headrace", *given)
        return gateway.ready("gateway")  # it listens; the trainer waits until it can serve

    def _ray_pool(self, ending: ExitStack) -> tuple[str, str]:
        from headrace.demo.cluster import ray_pool

        channel = {"n_rollouts": self.options.recipe.rollouts, "group_timeout_s": float(ABANDONED_S)}
        return ending.enter_context(ray_pool(ACTOR, self.run / "journal", {"train": channel}))

    def _trainer(self, processes: Processes, model: Path, gateway: str, pool: str, *, resume: bool) -> Child:
        config = trainer_config(
            self.options.recipe,
            model=model,
            run=self.run / "trainer",
            pool=pool,
            gateway=gateway,
            seed=self.options.seed,
            steps=self.options.steps,
            sync_mode=self.options.sync_mode,
        )
        path = self.run / "trainer.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return processes.start("trainer", "headrace", "train", path, *(["--resume"] if resume else []))

    def _agents(self, processes: Processes, gateway: str) -> Child:
        recipe, options = self.options.recipe, self.options
        return processes.start(
            *("agents", "headrace.demo.agents", "--address", gateway, "--run", self.run),
            *("--task", options.task, "--seed", options.seed, "--rollouts", recipe.rollouts, "--ahead", recipe.groups),
        )


def _settled(options: Options, run: Path, *, resume: bool) -> tuple[Settled, float]:
    """The run's settings and the seconds that it took before: a resumed run goes on as it began."""
    kept = run / SETTINGS
    if resume:
        if not kept.exists():
            raise InvalidInput(f"--resume: {run} holds no demo; without --resume one would begin there")
        found = orjson.loads(kept.read_bytes())
        known = msgspec.convert(found["settings"], Settled)
        return msgspec.structs.replace(known, steps=options.steps or known.steps), float(found["seconds"])
    if run.exists() and any(run.iterdir()):
        raise InvalidInput(f"--run {run} is not empty; go on with --resume, or name another folder")
    if options.task not in TASKS:
        raise InvalidInput(f"--task {options.task!r} is not known; there are {', '.join(TASKS)}")
    if (options.engine == "vllm") != (options.vllm_addresses is not None):
        raise InvalidInput("--engine vllm and --vllm-addresses go together: the demo starts no vLLM, it uses yours")
    if options.engine == "vllm" and options.model is None:
        raise InvalidInput(
            "--engine vllm needs --model: the folder of the checkpoint that your vLLM serves "
            "(python -m headrace.demo.model FOLDER writes one)"
        )
    (run / "logs").mkdir(parents=True, exist_ok=True)
    recipe = RECIPES[options.task]
    given = {**msgspec.structs.asdict(options), "steps": options.steps or recipe.steps, "recipe": recipe}
    settled = Settled(**given)
    _keep(run, settled, 0.0)
    return settled, 0.0


def _keep(run: Path, settled: Settled, seconds: float) -> None:
    kept = {"settings": msgspec.to_builtins(settled), "seconds": round(seconds, 1)}
    (run / SETTINGS).write_bytes(orjson.dumps(kept, option=orjson.OPT_INDENT_2))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
