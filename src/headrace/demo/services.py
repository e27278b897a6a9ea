"""The processes of the demo, as a plan for the runner: engine, gateway with its pool, trainer and agents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from headrace.demo.recipe import Recipe, trainer_config
from headrace.run.progress import METRICS
from headrace.run.ray_pool import RayPool
from headrace.run.services import (
    HOST,
    JOURNAL,
    TRAINER,
    TRAINER_FILE,
    RunPlan,
    RunPorts,
    Service,
    gateway_does,
    headrace,
)

#: Seconds after which a group that a crash left incomplete is dropped, and counted as such.
GROUP_TIMEOUT_S = 60
#: The pool's name on Ray.
ACTOR = "headrace-demo"


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


def demo_plan(
    settled: DemoSettings, model: Path, run: Path, ports: RunPorts, pool: RayPool | None, *, resume: bool
) -> RunPlan:
    """What the demo starts, in the run's folder. `pool` is one on Ray, where there is one. Pure."""
    gateway = f"http://{HOST}:{ports.gateway}"
    started = tuple(f"http://{HOST}:{port}" for port in ports.servers)
    servers = started or tuple((settled.vllm_addresses or "").split(","))
    config = trainer_config(
        settled.recipe,
        model=model,
        run=run / TRAINER,
        pool=pool.address if pool is not None else gateway,
        gateway=gateway,
        seed=settled.seed,
        steps=settled.steps,
        sync_mode=settled.sync_mode,
    )
    services = [
        *(_engine(settled, model, address, port) for address, port in zip(started, ports.servers, strict=True)),
        Service(
            "gateway",
            headrace(*_gateway(settled, model, run, ports.gateway, servers, pool)),
            gateway_does(gateway),
            announces="gateway",
        ),
        Service(
            "trainer",
            headrace("train", run / TRAINER_FILE, *(["--resume"] if resume else [])),
            "has published its weights",
            announces="trainer",
            after={"gateway": "listening"},
            again=() if resume else ("--resume",),
            ends=True,
        ),
        Service(
            "agents",
            (sys.executable, "-m", "headrace.demo.agents", *map(str, _agents(settled, run, gateway))),
            "play; all that they know is the gateway's address",
            # The trainer's word is the last: the servers have the run's weights then, a restarted engine has others.
            after={"gateway": "ready", "trainer": "ready"},
        ),
    ]
    address = pool.address if pool is not None else gateway
    return RunPlan(tuple(services), {TRAINER_FILE: config}, gateway, address, servers)


def _engine(settled: DemoSettings, model: Path, address: str, port: int) -> Service:
    return Service(
        "engine",
        headrace("engine", "--model", model, "--port", port, "--seed", settled.seed),
        f"serves the model on {address}",
        announces="engine",
        health=address,
        takes_with=("trainer",),
    )


def _gateway(
    settled: DemoSettings, model: Path, run: Path, port: int, servers: tuple[str, ...], pool: RayPool | None
) -> list[Any]:
    given = ["--vllm-addresses", ",".join(servers), "--tokenizer-path", model, "--host", HOST, "--port", port, "--open"]
    given += ["--dashboard-metrics", run / TRAINER / METRICS]
    if pool is not None:
        given += ["--data-pool-name", pool.name, "--ray-address", pool.cluster]
        return ["gateway", *given, "--prompt-length", 64, "--response-length", 16]
    options = ",".join(f"{name}={value:g}" for name, value in channel(settled.recipe).items())
    return ["serve", *given, "--journal", run / JOURNAL, "--durability", "os", "--channel", f"train:{options}"]


def _agents(settled: DemoSettings, run: Path, gateway: str) -> list[Any]:
    return [
        *("--address", gateway, "--run", run, "--task", settled.task, "--seed", settled.seed),
        *("--rollouts", settled.recipe.rollouts, "--ahead", settled.recipe.groups),
    ]
