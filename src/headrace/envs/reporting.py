"""What an environment reports: metrics, the table of rollouts, evaluations."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from headrace.envs.api_client import ApiClient
from headrace.envs.evaluation import Evaluation
from headrace.envs.metrics import (
    Counts,
    MetricsLog,
    Performance,
    drain_lists,
    length_metrics,
    rollout_table,
)
from headrace.envs.server import ServerManager
from headrace.envs.types import BaseEnvConfig, Item, ScoredDataGroup

log = logging.getLogger("headrace.envs")

T = TypeVar("T")


class Reporting:
    """The reporting methods of `BaseEnv`, which authors may override; an override calls `super()`."""

    name: ClassVar[str | None]
    config: BaseEnvConfig
    api: ApiClient
    server: ServerManager
    tokenizer: Any
    counts: Counts
    workers: set[asyncio.Task[Any]]
    status_dict: dict[str, Any]
    curr_step: int
    max_token_len: int
    wandb_project: str | None
    wandb_group: str | None
    wandb_prepend: str | None
    completion_lengths: list[int]
    rollouts_for_wandb: list[list[tuple[Any, ...]]]
    metrics_log: MetricsLog
    #: The last evaluation that `evaluate_log` was called with.
    last_evaluation: Evaluation | None = None
    _no_tokenizer: str | None = None
    _shown_as_ids = False

    @cached_property
    def _performance(self) -> Performance:
        return Performance()

    async def setup_wandb(self) -> None:
        """Fetches the trainer's wandb project and group, and begins a run there, where the trainer has one."""
        found = await self.api.get("/wandb_info")
        self.wandb_group, self.wandb_project = found["group"], found["project"]
        if self.wandb_project is None:
            log.info("the trainer logs to no wandb project: neither do we")
            return
        await self.open_wandb()

    async def open_wandb(self) -> None:
        """Begins a run in wandb, where `use_wandb` is set."""
        if not self.config.use_wandb:
            return
        shown = self.config.model_dump(mode="json", exclude={"rollout_server_key"})
        project = self.wandb_project or self.name or type(self).__name__
        names = {"group": self.wandb_group, "name": self.wandb_prepend or self.config.wandb_name}
        await asyncio.to_thread(self.metrics_log.open_wandb, project, **names, config=shown)

    async def add_rollouts_for_wandb(self, scored_data: ScoredDataGroup, item: Item = None) -> None:
        """Keeps rollouts of a group for the next table of them."""
        keep = self.config.num_rollouts_per_group_for_logging
        texts = zip(await self._texts(scored_data), scored_data["scores"], strict=True)
        self.rollouts_for_wandb.append(list(texts)[: None if keep == -1 else keep])
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep or None]

    async def _texts(self, group: ScoredDataGroup) -> list[str]:
        """The rollouts' messages as text; without messages, their decoded tokens, or their ids."""
        messages = group.get("messages")
        if messages:
            return ["\n".join(f"{said['role']}: {said.get('content')}" for said in chat) for chat in messages]
        found = await self.decoded(group["tokens"])
        return found if found is not None else [" ".join(map(str, ids)) for ids in group["tokens"]]

    async def decoded(self, sequences: list[list[int]]) -> list[str] | None:
        """Decoded tokens; None where the tokenizer cannot be loaded. It is tried once, in a thread: a hub that is away
        takes long to fail.
        """
        if "tokenizer" not in self.__dict__:
            async with self._loading:
                if self._shown_as_ids:
                    return None
                try:
                    await in_thread(lambda: self.tokenizer)
                except Exception as error:
                    self._shown_as_ids = True
                    log.warning("rollouts are shown as ids: %s", error)
                    return None
        return [self.tokenizer.decode(ids) for ids in sequences]

    @cached_property
    def _loading(self) -> asyncio.Lock:
        return asyncio.Lock()

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Adds the table of the kept rollouts."""
        if self.rollouts_for_wandb:
            wandb_metrics["train/rollouts"] = rollout_table(self.rollouts_for_wandb)
        return wandb_metrics

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """Adds durations and rates since the last call."""
        metrics_dict |= drain_lists(self)
        metrics_dict |= self._performance.row(self.counts, len(self.workers), self.status_dict.get("queue_size"))
        return metrics_dict

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Writes a row of metrics. An override adds its own and calls this."""
        found = dict(wandb_metrics or {})
        found |= length_metrics(self.completion_lengths, self.max_token_len)
        found = self.perf_stats(await self.create_rollout_table(found))
        self.rollouts_for_wandb, self.completion_lengths = [], []
        self.metrics_log.write(self.curr_step, found, await self._server_metrics(), self.wandb_prepend)

    async def _server_metrics(self) -> dict[str, Any]:
        """The rollout servers' metrics; in wandb they have the same names for all environments."""
        found: dict[str, Any] = {}
        for number, server in enumerate(self.server.servers):
            found |= await server.wandb_metrics({}, f"server_{number}")
        return found

    async def evaluate_log(
        self,
        metrics: Mapping[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: Mapping[str, Any] | None = None,
        samples: Iterable[Mapping[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Writes an evaluation to `data_dir_to_save_evals`: metrics.json, and samples.jsonl where there are samples."""
        end = time.time() if end_time is None else end_time
        found = Evaluation(
            task=task_name or f"{self.name or type(self).__name__}_eval",
            model=model_name or self._model,
            metrics=metrics,
            seconds=end - (end if start_time is None else start_time),
            generation_parameters={"max_new_tokens": self.config.max_token_length, **(generation_parameters or {})},
            samples=samples or (),
        )
        self.last_evaluation = found
        if verbose:
            log.info("%s", found)
        folder = self.config.data_dir_to_save_evals
        if folder is None:
            log.info("the evaluation is not written: data_dir_to_save_evals names no folder")
            return
        found.write(Path(folder))

    @property
    def _model(self) -> str | None:
        """The name of the model that is rolled out."""
        named = getattr(self.config, "model_name", None)
        return named or next((server.config.model_name for server in self.server.servers), None)


async def in_thread(call: Callable[[], T]) -> T:
    """The result of a blocking call in a daemon thread: unlike one of `asyncio.to_thread`, the end of the process does
    not wait for it, nor does a cancelled caller.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except BaseException as error:  # whatever it is, it is the caller's
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="headrace-preflight", daemon=True).start()
    return await future
