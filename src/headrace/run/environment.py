"""An environment's part in a run: what it is told, which of its commands are started, and what they leave behind.

    headrace env FILE serve       plays and scores for the trainer (`serve_file`)
    headrace env FILE process     plays one group, for a dry run (`group_file`, `read_group`)
    headrace env FILE evaluate    its own evaluation of a model that is served (`evaluate_file`, `read_evaluation`)
    headrace env FILE check       is imported and reads its configuration; starts nothing (`check_environment`)

All of them call the model through the gateway, which holds calls while weights are exchanged and records none of them:
the scored group that the environment sends is all that is kept.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson
import yaml

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.envs.evaluation import METRICS, SAMPLES
from headrace.metrics import flat
from headrace.processes import Processes
from headrace.run.config import RunConfig
from headrace.run.results import EvaluatedRollout, EvaluationResult, summary
from headrace.run.services import EVALUATIONS, headrace

#: Files of an environment in a run's folder: its metrics, and groups that the gateway has not taken yet.
METRICS_FILE, SPOOL = "environment.metrics.jsonl", "spool"
#: The folder, among the run's evaluations, of those that an environment makes by itself.
OWN_EVALUATIONS = "environment"
#: Most tokens of a rollout where the trainer is given no bound: what environments have by themselves.
MAX_TOKENS = 2048
#: Seconds that the import of an environment's file may take: torch and a dataset's library take a minute on a machine
#: that is busy with other things.
IMPORT_S = 900.0
#: What its errors begin with: how its command line was called.
OWN_NAME = r"^headrace env[^:]*: "

#: Fields of a sample that say what an item was worth, the first of which counts; a list has a score for each rollout.
SCORES = ("scores", "score", "reward", "correct", "is_correct")
#: Last parts of names of metrics that are a mean score, where no sample has one.
MEANS = ("score", "mean_score", "reward", "mean_reward", "avg_reward", "accuracy", "percent_correct")


class PlayedGroup(msgspec.Struct, frozen=True):
    """A group that an environment played: of its first rollout the conversation and how many tokens were sampled; the
    scores of all."""

    messages: list[dict[str, Any]]
    sampled: int
    scores: list[float]


# -- what it is told ---------------------------------------------------------------------------------------------------


def environment_command(config: RunConfig, subcommand: str, file: Path) -> tuple[str, ...]:
    """The command line of one of its commands, to be run in the folder of the run's file."""
    return headrace("env", config.agent.env, subcommand, "--config", file)


def serve_file(config: RunConfig, gateway: str, servers: Sequence[str], run: Path) -> dict[str, Any]:
    """The configuration for `serve`: the trainer's steps and batches, and where it keeps what is its own."""
    env: dict[str, Any] = {
        "rollout_server_url": gateway,
        "total_steps": config.train.steps,
        "batch_size": config.train.batch_size,
        "spool_dir": str(run / SPOOL),
        "data_dir_to_save_evals": str(run / EVALUATIONS / OWN_EVALUATIONS),
    }
    if config.evaluate.every:  # the run evaluates, so the environment need not
        env["steps_per_eval"] = 0
    return _file(config, gateway, servers, run, env)


def group_file(config: RunConfig, gateway: str, servers: Sequence[str], run: Path, groups: Path) -> dict[str, Any]:
    """The configuration for `process`: one group, into the file `groups`."""
    return _file(config, gateway, servers, run, {"total_steps": 1, "data_path_to_save_groups": str(groups)})


def evaluate_file(config: RunConfig, gateway: str, servers: Sequence[str], run: Path, into: Path) -> dict[str, Any]:
    """The configuration for `evaluate`, which leaves its files in the folder `into`."""
    return _file(config, gateway, servers, run, {"data_dir_to_save_evals": str(into)})


def _file(config: RunConfig, gateway: str, servers: Sequence[str], run: Path, env: Mapping[str, Any]) -> dict[str, Any]:
    server = {"base_url": f"{gateway}/v1", "model_name": config.model, "server_type": "gateway", "record": False}
    return {
        "env": {
            "tokenizer_name": config.model,
            "max_token_length": config.train.max_length or MAX_TOKENS,
            "use_wandb": False,
            "metrics_path": str(run / METRICS_FILE),
            **env,
        },
        # Named once for each rollout server behind it: by their number it decides how many items it plays at a time.
        "openai": [dict(server) for _ in servers],
        "slurm": False,
    }


def check_environment(config: RunConfig, base: Path) -> None:
    """Has a process import the environment's file and read its configuration. Raises `InvalidInput` with what it said
    where it cannot."""
    assert config.agent.env is not None
    with tempfile.TemporaryDirectory(prefix="headrace-check-") as name:
        folder = Path(name)
        file = folder / "env.yaml"
        file.write_text(yaml.safe_dump(serve_file(config, "http://127.0.0.1:1", [""], folder), sort_keys=False))
        with Processes(folder) as processes:
            child = processes.start_program("check", environment_command(config, "check", file), folder=base)
            try:
                code = child.process.wait(IMPORT_S)
            except subprocess.TimeoutExpired:
                raise InvalidInput(
                    f"agent.env: {config.agent.env} was not imported within {IMPORT_S:g} s; it should do its work in "
                    "setup(), not when it is imported"
                ) from None
            if code:
                said = child.said().strip().splitlines() or [f"its import ended with code {code}"]
                raise InvalidInput(f"agent.env: {re.sub(OWN_NAME, '', said[-1])}")


# -- what it leaves ----------------------------------------------------------------------------------------------------


def read_group(groups: Path) -> PlayedGroup:
    """The group that `process` wrote. Raises `HeadraceError` where there is none."""
    lines = groups.read_bytes().splitlines() if groups.exists() else []
    if not lines:
        raise HeadraceError(f"the environment wrote no group to {groups}")
    found = orjson.loads(lines[0])
    masks = found["masks"][0]
    messages = (found.get("messages") or [[]])[0]
    return PlayedGroup(list(messages or []), len(masks) - masks.count(-100), [float(one) for one in found["scores"]])


def read_evaluation(
    folder: Path, name: str, step: int, *, pass_reward: float, by: Sequence[str] = ()
) -> EvaluationResult:
    """What `evaluate` came to, by its files. `by` are fields of its samples.

    The mean and pass@k are over its samples' scores. Where they have none, the mean is that metric which is named as
    one, or the only one; None where there is no such metric either. Raises `HeadraceError` where it left no files.
    """
    try:
        told = orjson.loads((folder / METRICS).read_bytes())
    except FileNotFoundError:
        raise HeadraceError(f"the environment's evaluate() left no {METRICS} in {folder}") from None
    metrics = flat(told["results"]["all"])
    seconds = float(told["config_general"]["total_evaluation_time_seconds"])
    lines = (folder / SAMPLES).read_bytes().splitlines() if (folder / SAMPLES).exists() else []
    samples = [orjson.loads(line) for line in lines]
    field = next((name for name in SCORES if any(sample.get(name) is not None for sample in samples)), None)
    played = [one for at, sample in enumerate(samples) for one in _rollouts(at, sample, field, by)] if field else []
    rollouts = max((one.rollout + 1 for one in played), default=1)
    found = summary(name, step, played, rollouts=rollouts, pass_reward=pass_reward, seconds=seconds)
    mean = found.mean if played else _mean_of(metrics)
    return msgspec.structs.replace(found, mean=mean, metrics=metrics)


def _rollouts(at: int, sample: Mapping[str, Any], field: str, by: Sequence[str]) -> list[EvaluatedRollout]:
    """The rollouts of one item: one, or as many as it has scores. Why one has none is its `error`, where it says so."""
    given, why = sample.get(field), str(sample.get("error") or "")
    scores = given if isinstance(given, list) else [given]
    values = {name: str(sample[name]) for name in by if name in sample}
    said = sample.get("messages") or []
    text = str(said[-1].get("content")) if said and isinstance(said[-1], dict) else None
    return [
        EvaluatedRollout(at, number, "", float(score), None, text, by=values)
        if isinstance(score, int | float)
        else EvaluatedRollout(at, number, "", None, why or f"its {field} is {score!r}, no number", text, by=values)
        for number, score in enumerate(scores)
    ]


def _mean_of(metrics: Mapping[str, float]) -> float | None:
    """The metric that is a mean score by its name, or the only one."""
    named = [value for name, value in metrics.items() if name.rpartition("/")[2] in MEANS]
    if named:
        return named[0]
    return next(iter(metrics.values())) if len(metrics) == 1 else None
