"""`atroposlib.envs.eval`: evaluations without an environment."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.compat.atropos.envs.server_handling.server_baseline import APIServerConfig
from headrace.compat.atropos.utils.display import display_metrics_table
from headrace.envs.evaluation import Evaluation
from headrace.envs.server import ChatCompletion, ServerManager

__all__ = ["EvalBase", "eval_runner", "evaluate_log", "pass_at_k"]

log = logging.getLogger("headrace.compat")


def pass_at_k(m: int, c: int, k: int) -> float:
    """The probability that one of `k` samples is right, where `c` of `m` were."""
    if m - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / at for at in range(m - c + 1, m + 1))


def evaluate_log(
    metrics: Mapping[str, Any],
    eval_dir: str | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: Mapping[str, Any] | None = None,
    samples: Iterable[Mapping[str, Any]] | None = None,
    verbose: bool = True,
) -> None:
    """Writes `metrics.json`, and `samples.jsonl` where there are samples, into the folder."""
    if eval_dir is None:
        log.warning("eval_dir is not set: the evaluation is not written")
        return
    now = time.time()
    begin, end = now if start_time is None else start_time, now if end_time is None else end_time
    if verbose:
        display_metrics_table(str(task_name), metrics, begin, end)
    found = Evaluation(
        str(task_name), model_name, metrics, end - begin, generation_parameters or {}, list(samples or ())
    )
    found.write(Path(eval_dir))
    print(f"Evaluation results in {eval_dir}")


class EvalBase(ABC):
    """An evaluation: `setup_data` returns items, `run_item` the metrics and a sample of each; metrics are averaged."""

    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **kwargs: Any) -> None:
        self.pass_at_n = pass_at_n
        self.pass_at_n_samples = pass_at_n_samples
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.data = self.setup_data()

    def get_generation_params(self) -> dict[str, Any]:
        """The sampling parameters of its calls."""
        return {
            "temperature": getattr(self, "temperature", 0.0),
            "n": max(self.pass_at_n_samples, self.pass_at_n),
            "top_p": getattr(self, "top_p", 1.0),
            "max_tokens": getattr(self, "max_tokens", -1),
        }

    async def chat_completion(self, server: ServerManager, messages: list[dict[str, Any]]) -> ChatCompletion:
        """One chat call with these parameters."""
        return await server.chat_completion(messages=messages, **self.get_generation_params())

    @abstractmethod
    def setup_data(self) -> list[Any]:
        """The items to evaluate."""

    @abstractmethod
    async def run_item(self, server: ServerManager, data_item: Any) -> tuple[dict[str, float], Any]:
        """An item's metrics, and the sample that is written."""

    async def __call__(self, server_manager: ServerManager) -> dict[str, float]:
        began = time.time()
        results = await asyncio.gather(*(self.run_item(server_manager, item) for item in self.data))
        ended = time.time()
        every = [found for found, _ in results]
        metrics = {key: sum(found[key] for found in every) / len(every) for key in (every[0] if every else ())}
        several = f":{self.pass_at_n_samples}" if self.pass_at_n != self.pass_at_n_samples else ""
        task = f"{type(self).__name__}@{self.pass_at_n}{several}"
        print(f"{task} metrics: {metrics}")
        evaluate_log(
            metrics,
            eval_dir=getattr(self, "eval_dir", None),
            task_name=task,
            model_name=server_manager.servers[0].config.model_name,
            start_time=began,
            end_time=ended,
            generation_parameters=self.get_generation_params(),
            samples=[sample for _, sample in results],
            verbose=getattr(self, "verbose", False),
        )
        return metrics


async def eval_runner(eval_env: EvalBase) -> dict[str, float]:
    """Runs an evaluation against the server that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--server-url", default="http://localhost:8000", help="the server's address")
    parser.add_argument("--model-name", default="default", help="the name that it serves the model under")
    given = parser.parse_args()
    config = APIServerConfig(
        api_key="dummy", base_url=given.server_url, model_name=given.model_name, health_check=False
    )
    server = ServerManager([config])
    try:
        return await eval_env(server)
    finally:
        await server.close()
