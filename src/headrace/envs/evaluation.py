"""An evaluation's result and its files (`metrics.json` in lighteval's shape, `samples.jsonl`), and evaluations while
training goes on, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from headrace.data.json import to_json
from headrace.envs.metrics import Counts
from headrace.files import write_whole
from headrace.metrics import flat

log = logging.getLogger("headrace.envs")

METRICS, SAMPLES = "metrics.json", "samples.jsonl"
#: The first part of a task's name in `metrics.json`, by which readers of the file recognise environments' tasks.
SUITE = "atropos"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation."""

    task: str
    model: str | None
    metrics: Mapping[str, Any]
    seconds: float
    generation_parameters: Mapping[str, Any] = field(default_factory=dict)
    samples: Iterable[Mapping[str, Any]] = ()

    def write(self, folder: Path) -> None:
        """Writes metrics.json, and samples.jsonl where there are samples; each is whole or not there."""
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            "config_general": {
                "model_name": self.model,
                "total_evaluation_time_seconds": str(self.seconds),
                "generation_parameters": self.generation_parameters,
            },
            "results": {f"{SUITE}|{self.task}|0": self.metrics, "all": self.metrics},
        }
        write_whole(folder / METRICS, to_json(found, orjson.OPT_INDENT_2) + b"\n")
        lines = b"".join(to_json(sample) + b"\n" for sample in self.samples)
        if lines:
            write_whole(folder / SAMPLES, lines)

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in flat(self.metrics).items())
        return f"{self.task}, {self.seconds:.1f} s: {numbers or 'no numbers'}"


class Evaluator:
    """Runs evaluations in a task, one at a time; `ended` is called after each, so that held work can go on."""

    def __init__(self, evaluate: Callable[[], Awaitable[Any]], counts: Counts, ended: Callable[[], None]) -> None:
        self._evaluate, self._counts, self._ended = evaluate, counts, ended
        self.task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether an evaluation runs."""
        return self.task is not None and not self.task.done()

    def begin(self, step: int) -> None:
        """Starts an evaluation, unless one is still running."""
        if self.running:
            log.warning("the evaluation of step %d is left out: the one before is still running", step)
            return
        log.info("evaluating at step %d", step)
        self.task = asyncio.create_task(self._run(), name="evaluation")

    async def _run(self) -> None:
        try:
            with self._counts.guard("evaluate"):
                await self._evaluate()
                self._counts.evaluations += 1
        finally:
            asyncio.get_running_loop().call_soon(self._ended)  # once the task is done

    async def end(self, *, wait: bool) -> None:
        """Waits for a running evaluation, or cancels it: it makes no groups that could be lost."""
        if self.task is None:
            return
        if not wait:
            self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)  # which, cancelled, cancels the evaluation
