"""What a run starts: every process with its command line, and the configuration files that they read.

A plan is a pure function of the run's file, its folder and its ports: nothing is started, opened or asked. All
addresses are known beforehand, so a process that dies is started again by the very same words.

    engine, engine-2, ...     serve the model
    pool                      on Ray alone: the process that the pool's actor belongs to
    gateway                   records every call into its journalled pool, below the run's folder
    reward                    scores what is complete and unscored, on both channels
    trainer                   learns from groups that are complete and scored, and publishes weights
    rollouter                 plays the rows of the data; in its place, environment, which has its own
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.run.cluster import RayPlace, actor_name
from headrace.run.config import MODEL_MARK, PORT_MARK, TRAIN, VAL, RunConfig
from headrace.run.environment import environment_command, serve_file
from headrace.run.progress import METRICS
from headrace.run.services import (
    ENVIRONMENT_FILE,
    HOST,
    JOURNAL,
    OUTBOX,
    REWARD_FILE,
    ROLLOUT_FILE,
    ROLLOUT_STATE,
    TRAINER,
    TRAINER_FILE,
    RunPlan,
    RunPorts,
    Service,
    State,
    gateway_does,
    headrace,
)
from headrace.trainer.config import LearningConfig


def plan(config: RunConfig, base: Path, run: Path, ports: RunPorts, *, resume: bool = False) -> RunPlan:
    """The plan of a run in the folder `run`, whose file lies in the folder `base`. Pure."""
    gateway = f"http://{config.host}:{ports.gateway}"
    servers = tuple(config.servers.addresses) or tuple(f"http://{HOST}:{port}" for port in ports.servers)
    pool = gateway if config.where == "local" else config.where.pool_address(run)
    services = [*_servers(config, base, ports)]
    if config.where != "local":
        services.append(_ray_pool(config, config.where, run, pool))
    services.append(_gateway(config, run, ports, servers, pool))
    files: dict[str, Mapping[str, Any]] = {TRAINER_FILE: trainer_file(config, run, gateway, pool)}
    if config.reward is not None:
        files[REWARD_FILE] = config.reward.below(base).model_dump(mode="json", exclude_defaults=True)
        services.append(_reward(config, base, run, pool))
    services.append(_trainer(config, run, resume=resume))
    if config.agent.env is None:
        files[ROLLOUT_FILE] = rollout_file(config, base, run, gateway)
        services.append(_rollouter(base, run))
    else:
        files[ENVIRONMENT_FILE] = serve_file(config, gateway, servers, run)
        services.append(_environment(config, base, run))
    return RunPlan(tuple(services), files, gateway, pool, servers)


def _servers(config: RunConfig, base: Path, ports: RunPorts) -> list[Service]:
    found = []
    for number, port in enumerate(ports.servers, 1):
        command, env = server_command(config.servers.command or "", config.model, port)
        ours = command[1:4] == ["-m", "headrace", "engine"]
        found.append(
            Service(
                "engine" if number == 1 else f"engine-{number}",
                tuple(command),
                f"serves the model on http://{HOST}:{port}",
                announces="engine" if ours else None,
                health=f"http://{HOST}:{port}",
                # It comes back with the weights that the run began with: the trainer then publishes its own.
                takes_with=("trainer",),
                env=env,
                folder=base,
            )
        )
    return found


def server_command(start: str, model: str, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that serves a model on a port, and what is added to its environment."""
    words = shlex.split(start)
    # Importance ratios are against what was sampled from, whatever the temperature.
    mode = [] if "--logprobs-mode" in start else ["--logprobs-mode", "processed_logprobs"]
    where = ["--host", HOST, "--port", str(port)]
    if words[:2] == ["headrace", "engine"]:
        return [*headrace("engine", "--model", model), *where, *mode, *words[2:]], {}
    if words[:2] == ["vllm", "serve"]:
        # The trainer's control routes: they exchange weights, and adapters where it computes them.
        lora = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if "--enable-lora" in words else {}
        return [*words[:2], model, *where, *mode, *words[2:]], {"VLLM_SERVER_DEV_MODE": "1", **lora}
    return [word.replace(MODEL_MARK, model).replace(PORT_MARK, str(port)) for word in words], {}


def _gateway(config: RunConfig, run: Path, ports: RunPorts, servers: Sequence[str], pool: str) -> Service:
    given = config.gateway
    options: list[Any] = ["--vllm-addresses", ",".join(servers), "--tokenizer-path", config.model]
    options += ["--host", config.host, "--port", ports.gateway, "--dashboard-metrics", run / TRAINER / METRICS]
    if config.where == "local":
        options += ["--journal", run / JOURNAL, "--durability", given.durability]
        options += [*_memory_flag(config), *_channel_flags(config)]
    else:  # the pool is elsewhere: the folder is where steps wait while it is out of reach
        options += ["--pool-address", pool, "--journal", run / OUTBOX, "--durability", given.durability]
    for name in ("prompt_length", "response_length"):
        if (value := getattr(given, name)) is not None:
            options += ["--" + name.replace("_", "-"), value]
    if config.agent.env is not None:
        options += ["--serve-channel", TRAIN]
    return Service(
        "gateway",
        headrace("gateway", *options),
        gateway_does(f"http://{config.host}:{ports.gateway}"),
        announces="gateway",
        after=_states({"pool": "ready"} if config.where != "local" else {}),
    )


def _ray_pool(config: RunConfig, where: RayPlace, run: Path, address: str) -> Service:
    """Its actor ends with it; Ray begins the actor again from its journal when it dies."""
    command = headrace(
        *("pool", "start", "--attach", "--name", actor_name("pool", run), "--ray-address", where.ray),
        *("--namespace", where.namespace, "--journal", run / JOURNAL, "--durability", config.gateway.durability),
        *(["--shared-journal"] if where.shared_folder else []),
        *(*where.pool.flags(), *_memory_flag(config), *_channel_flags(config)),
    )
    return Service("pool", command, f"is an actor of the cluster, {address}", announces="pool")


def _memory_flag(config: RunConfig) -> list[Any]:
    given = config.gateway.pool_memory_mb
    return ["--pool-memory-mb", given] if given is not None else []


def _channel_flags(config: RunConfig) -> list[str]:
    found = []
    for channel, settings in channels(config).items():
        written = ",".join(f"{name}={_flag(value)}" for name, value in settings.items())
        found += ["--channel", f"{channel}:{written}"]
    return found


def channels(config: RunConfig) -> dict[str, dict[str, Any]]:
    """The options of the pool's channels. Where a reward is configured, nothing is handed out before it has one."""
    scored = config.reward is not None
    train: dict[str, Any] = {"n_rollouts": config.n_rollouts or 1, "require_reward": scored}
    if config.rollout.group_timeout_s is not None:
        train["group_timeout_s"] = config.rollout.group_timeout_s
    return {TRAIN: train, VAL: {"n_rollouts": 1, "require_reward": scored}}


def _flag(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


def _reward(config: RunConfig, base: Path, run: Path, pool: str) -> Service:
    command = headrace(
        *("reward", "start", "--reward", run / REWARD_FILE, "--pool", pool),
        *("--channel", TRAIN, "--channel", VAL, "--tokenizer-path", config.model),
    )
    does, after = "scores what agents did, on its own time", _states({"gateway": "listening"})
    if config.where == "local":
        return Service("reward", command, does, announces="reward loop", after=after, folder=base)
    place = ("--ray-address", config.where.ray, "--ray-namespace", config.where.namespace)
    attached = ("--attach", "--name", actor_name("reward", run), *place, *config.where.reward.flags())
    # Not after the gateway: its actor asks the pool's.
    after = _states({"pool": "ready"})
    return Service("reward", (*command, *attached), does, announces="reward loop", after=after, folder=base)


def _trainer(config: RunConfig, run: Path, *, resume: bool) -> Service:
    # Servers that the run starts listen on this machine alone, and rank 0 is to reach them.
    workers = [] if config.where == "local" else config.where.train_flags(here=config.servers.started > 0)
    return Service(
        "trainer",
        headrace("train", run / TRAINER_FILE, *workers, *(["--resume"] if resume else [])),
        "has published its weights",
        announces="trainer",
        after=_states({"gateway": "listening"}),
        again=() if resume else ("--resume",),
        ends=True,
    )


def _rollouter(base: Path, run: Path) -> Service:
    return Service(
        "rollouter",
        headrace("rollout", run / ROLLOUT_FILE),
        "plays the tasks; all that agents know is a base URL",
        announces="rollouter",
        # The trainer's word: before it the servers may have other weights than this run's.
        after=_states({"gateway": "ready", "trainer": "ready"}),
        ends=True,
        final=True,
        folder=base,
    )


def _environment(config: RunConfig, base: Path, run: Path) -> Service:
    return Service(
        "environment",
        environment_command(config, "serve", run / ENVIRONMENT_FILE),
        "rolls out its own items and scores them",
        after=_states({"gateway": "ready", "trainer": "ready"}),
        ends=True,
        folder=base,
    )


def _states(given: Mapping[str, str]) -> Mapping[str, State]:
    return {name: "ready" if state == "ready" else "listening" for name, state in given.items()}


def trainer_file(config: RunConfig, run: Path, gateway: str, pool: str) -> dict[str, Any]:
    """The configuration for `headrace train`."""
    given = config.train
    learning = given.model_dump(mode="json", exclude_defaults=True, include={*LearningConfig.model_fields})
    return {
        **learning,
        "model": config.model,
        "run": str(run / TRAINER),
        # The rollouter admits by versions: batches that teach nothing must not hold it up.
        "version_each_step": True,
        "steps": given.steps,
        "pool": {
            "address": pool,
            "channel": TRAIN,
            "batch_size": given.batch_size,
            **({"n_rollouts": config.n_rollouts} if config.n_rollouts is not None else {}),
            # Rollouts are admitted a batch ahead already: a batch that waits here would be a version older.
            "prefetch": False,
        },
        "sync": {
            "gateway": gateway,
            **given.sync.model_dump(mode="json", exclude_defaults=True),
            "folder": str(run / TRAINER / "published"),
        },
    }


def rollout_file(config: RunConfig, base: Path, run: Path, gateway: str) -> dict[str, Any]:
    """The configuration for `headrace rollout`: rows of the training data on the channel that is learned from."""
    assert config.data is not None
    given = config.rollout
    return {
        "data": config.data.model_dump(mode="json", exclude_defaults=True, exclude={"val", "val_rollouts"}),
        "agent": config.agent.model_dump(mode="json", exclude_defaults=True),
        "gateway": {"address": gateway},
        "base": str(base),
        **({} if config.where == "local" else {"workers": config.where.workers()}),
        "rollout": {
            "steps": config.train.steps,
            "scored": config.reward is not None,
            "until_trained": True,
            "concurrency": given.concurrency,
            "max_staleness": given.max_staleness,
            "retries": given.retries,
            "batch_size": config.train.batch_size,
            "state": str(run / ROLLOUT_STATE),
        },
    }
