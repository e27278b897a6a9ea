"""The processes of one run, started together: each is a command of Headrace that knows the others by address only.

A start is mostly imports, so engine and gateway begin theirs at once and the trainer as soon as the gateway listens.
The engine's port is reserved beforehand: the gateway is given an address that nothing serves yet, and waits.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.console import Console

from headrace.data.errors import HeadraceError
from headrace.demo.recipe import Recipe, trainer_config
from headrace.net.server import address_of, listener
from headrace.processes import Child, Processes

#: Seconds that all processes together may take to be ready. Fifteen is usual on two cores; a machine that is busy with
#: other things has needed twenty times that.
START_TIMEOUT_S = 900.0
#: Seconds between two looks at what they say.
POLL_S = 0.05
#: Seconds after which a group that a crash left incomplete is dropped, and counted as such.
GROUP_TIMEOUT_S = 60
#: The pool's name on Ray.
ACTOR = "headrace-demo"
#: The trainer's configuration, in the run's folder.
TRAINER_CONFIG = "trainer.yaml"
#: What is told of each once it is ready.
READY = {
    "engine": "serves the model on {}",
    "gateway": "records every call, on {}",
    "trainer": "has published its weights, at {}",
}


class DemoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run, fixed at its first start."""

    task: str
    recipe: Recipe
    #: Most steps.
    steps: int
    seed: int = 0
    engine: str = "headrace"
    vllm_addresses: str | None = None
    model: str | None = None
    sync_mode: str = "auto"
    ray: bool = False


def channel(recipe: Recipe) -> dict[str, float]:
    """The options of the pool's channel for a task."""
    return {"n_rollouts": recipe.rollouts, "group_timeout_s": float(GROUP_TIMEOUT_S)}


class DemoStack:
    """Engine, gateway, trainer and agents of a run, once `start` has returned."""

    trainer: Child
    agents: Child
    #: Where the pool is reached.
    pool: str

    def __init__(self, settled: DemoSettings, run: Path, processes: Processes, console: Console) -> None:
        self._settled = settled
        self._run = run
        self._processes = processes
        self._console = console
        self._status = console.status("", spinner_style="dim")
        self._began = time.monotonic()
        #: Those that are not ready yet.
        self._awaited: dict[str, Child] = {}

    def start(self, ray: tuple[str, str] | None = None, *, resume: bool) -> None:
        """Starts the processes and prints each as it is ready. `ray`: the pool's address and the cluster's."""
        model = self._model()
        with ExitStack() as meanwhile:
            servers = self._servers(model, meanwhile)
            gateway = self._begin("gateway", "headrace", *self._gateway(model, servers, ray[1] if ray else None))
            meanwhile.enter_context(self._status)
            self._until(lambda: _address(gateway) is not None)
            address = _address(gateway) or ""
            self.pool = ray[0] if ray else address
            self.trainer = self._begin("trainer", "headrace", *self._trainer(model, address, resume=resume))
            # The trainer's word is the last: the servers have the run's weights then, a restarted engine has others.
            self._until(self._all_ready)
        self.agents = self._processes.start("agents", "headrace.demo.agents", *self._agents(address))
        self._tell("agents", "play; all that they know is the gateway's address")

    def _begin(self, name: str, *args: Any) -> Child:
        child = self._awaited[name] = self._processes.start(name, *args)
        return child

    def _until(self, met: Callable[[], bool]) -> None:
        give_up = self._began + START_TIMEOUT_S
        while not met():
            self._status.update(f"{self._seconds()}  waiting for {', '.join(self._awaited)}")
            self._processes.check()
            if time.monotonic() > give_up:
                logs = ", ".join(str(child.log) for child in self._awaited.values())
                raise HeadraceError(
                    f"{', '.join(self._awaited)}: not ready within {START_TIMEOUT_S:g} s; what was said: {logs}"
                )
            time.sleep(POLL_S)

    def _all_ready(self) -> bool:
        for name, child in list(self._awaited.items()):
            if (found := _announced(child, f"{name} ready")) is not None:
                del self._awaited[name]
                self._tell(name, READY[name].format(found))
        return not self._awaited

    # -- the parts -----------------------------------------------------------------------------------------------------

    def _model(self) -> Path:
        if self._settled.model is not None:
            return Path(self._settled.model)
        from headrace.demo.model import build

        found = build(self._run / "model", self._settled.seed)
        self._tell("model", f"random weights of seed {self._settled.seed}")
        return found

    def _servers(self, model: Path, meanwhile: ExitStack) -> str:
        """The rollout servers' addresses: the user's, or that of an engine which is started on a reserved port."""
        if self._settled.engine == "vllm":
            assert self._settled.vllm_addresses is not None
            return self._settled.vllm_addresses
        reserved = listener("127.0.0.1", 0)
        address, port = address_of(reserved), reserved.getsockname()[1]
        if sys.platform == "linux":
            meanwhile.enter_context(reserved)  # nobody is given this port, and one who asks for it can still listen
        else:
            reserved.close()
        self._begin("engine", "headrace", "engine", "--model", model, "--port", port, "--seed", self._settled.seed)
        return address

    def _gateway(self, model: Path, servers: str, cluster: str | None) -> list[Any]:
        given = ["--vllm-addresses", servers, "--tokenizer-path", model, "--host", "127.0.0.1", "--port", 0, "--open"]
        if cluster is not None:
            given += ["--data-pool-name", ACTOR, "--ray-address", cluster]
            return ["gateway", *given, "--prompt-length", 64, "--response-length", 16]
        options = ",".join(f"{name}={value:g}" for name, value in channel(self._settled.recipe).items())
        return [
            "serve",
            *given,
            "--journal",
            self._run / "journal",
            "--durability",
            "os",
            "--channel",
            f"train:{options}",
        ]

    def _trainer(self, model: Path, gateway: str, *, resume: bool) -> list[Any]:
        config = trainer_config(
            self._settled.recipe,
            model=model,
            run=self._run / "trainer",
            pool=self.pool,
            gateway=gateway,
            seed=self._settled.seed,
            steps=self._settled.steps,
            sync_mode=self._settled.sync_mode,
        )
        path = self._run / TRAINER_CONFIG
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return ["train", path, *(["--resume"] if resume else [])]

    def _agents(self, gateway: str) -> list[Any]:
        settled, recipe = self._settled, self._settled.recipe
        return [
            *("--address", gateway, "--run", self._run, "--task", settled.task, "--seed", settled.seed),
            *("--rollouts", recipe.rollouts, "--ahead", recipe.groups),
        ]

    # -- telling -------------------------------------------------------------------------------------------------------

    def _tell(self, name: str, words: str) -> None:
        self._console.print(f"{self._seconds()}  {name:<8} {words}", markup=False, highlight=False, soft_wrap=True)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._began:6.1f} s"


def _address(gateway: Child) -> str | None:
    """Where a gateway listens, once it does."""
    return _announced(gateway, "gateway listening") or _announced(gateway, "gateway ready")


def _announced(child: Child, words: str) -> str | None:
    """What follows in a child's line `WORDS on ADDRESS` or `WORDS at PROGRESS`; None until it has printed it."""
    found = re.search(rf"^{words} (?:on|at) (.+)$", child.said(), re.MULTILINE)
    return found[1] if found else None


@contextmanager
def ray_pool(name: str, journal: Path, channels: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """A journalled pool on a new local Ray cluster, which lives as long as the run: its address, and the cluster's.

    Gateway and trainer are plain processes that join the cluster by its address and reach the pool by its name; another
    cluster on the same machine does not matter.
    """
    import ray

    from headrace.pool.ray import DEFAULT_NAMESPACE, actor_address, start_pool, stop_pool

    started = ray.init("local", namespace=DEFAULT_NAMESPACE, include_dashboard=False, log_to_driver=False)
    cluster = str(started.address_info["gcs_address"])
    try:
        start_pool(name, journal=journal, channels=channels, durability="os")
        try:
            yield actor_address(name, cluster), cluster
        finally:
            stop_pool(name)
    finally:
        ray.shutdown()
