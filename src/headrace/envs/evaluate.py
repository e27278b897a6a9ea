"""One evaluation, and what it leaves: `metrics.json` in the shape that lighteval writes, and `samples.jsonl`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from headrace.data.json import to_json
from headrace.envs.preflight import preflight
from headrace.metrics import flat

if TYPE_CHECKING:
    from headrace.envs.base import BaseEnv

METRICS, SAMPLES = "metrics.json", "samples.jsonl"
#: The first part of a task's name in `metrics.json`: readers of this file know environments' tasks by it.
SUITE = "atropos"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    task: str
    model: str | None
    metrics: Mapping[str, Any]
    seconds: float
    generation_parameters: Mapping[str, Any] = field(default_factory=dict)
    samples: Iterable[Mapping[str, Any]] = ()

    def write(self, folder: Path) -> None:
        """Both files; samples only where there are some. Each is whole or not there."""
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            "config_general": {
                "model_name": self.model,
                "total_evaluation_time_seconds": str(self.seconds),
                "generation_parameters": self.generation_parameters,
            },
            "results": {f"{SUITE}|{self.task}|0": self.metrics, "all": self.metrics},
        }
        _replace(folder / METRICS, to_json(found, orjson.OPT_INDENT_2) + b"\n")
        lines = b"".join(to_json(sample) + b"\n" for sample in self.samples)
        if lines:
            _replace(folder / SAMPLES, lines)

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in flat(self.metrics).items())
        return f"{self.task}, {self.seconds:.1f} s: {numbers or 'no numbers'}"


def _replace(path: Path, data: bytes) -> None:
    draft = path.with_name(path.name + ".part")
    draft.write_bytes(data)
    os.replace(draft, path)


async def evaluate(env: BaseEnv) -> None:
    """Evaluates once. An environment that tells its metrics by `wandb_log` or returns them, rather than by
    `evaluate_log`, has them written all the same.
    """
    began = time.time()
    try:
        await preflight(env)
        await env.setup()
        await env.open_wandb()
        returned = await env.evaluate()
        with env.counts.guard("wandb_log"):  # the evaluation is there, whatever becomes of telling it
            await env.wandb_log({})
        if env.last_evaluation is None:
            told = {name: value for name, value in env.metrics_log.last.items() if not name.startswith("train")}
            found = returned if isinstance(returned, Mapping) else flat(told)
            await env.evaluate_log(found, start_time=began, end_time=time.time())
    finally:
        await env.close()
