"""`APIServer`: one rollout server, whatever it speaks. What a subclass adds is how three kinds of calls are made.

A server is passed over while it is down, and looked for until it is back; nobody who waits for it polls.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Any

from headrace.envs.server.answers import ChatCompletion, Completion, Tokens
from headrace.envs.server.concurrency import Concurrency, Outcome
from headrace.envs.server.config import APIServerConfig
from headrace.envs.server.reasoning import ReasoningConfig
from headrace.envs.server.router import Router
from headrace.envs.server.signal import Signal
from headrace.envs.server.statistics import Statistics
from headrace.envs.server.tokenizing import Tokenizing

logger = logging.getLogger(__name__)


class APIServer(ABC):
    """`tokenizing` is handed on by a manager, so that servers of one model load its tokenizer once."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        self.config = config
        self.reasoning_config = reasoning_config
        self.changed = Signal()
        self.sem = Concurrency(config.num_max_requests_at_once)
        self.eval_sem = Concurrency(config.num_requests_for_eval)
        self.statistics = Statistics(config.rolling_buffer_length)
        self.eval_statistics = Statistics(config.rolling_buffer_length)
        self.tokenizing = Tokenizing(config.model_name, config.tokenizer_name)
        #: Calls of environments that are not answered yet, and that this server has or could be given.
        self.open_calls = 0
        self.trouble = ""
        #: Seconds that calls wait for it while it is down; fewer where it has never been there.
        self.patience_s = float(config.timeout)
        self.down_since = 0.0
        self.check_task: asyncio.Task[None] | None = None
        self._healthy = True
        self._router = Router([self])

    # -- what a subclass says ------------------------------------------------------------------------------------------

    @abstractmethod
    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Runs from the moment at which the server is down; sets `server_healthy` once it is back."""

    async def unwell(self, within_s: float) -> str | None:
        """Why the server does not answer within so many seconds; None where it does, or cannot be asked."""
        return None

    async def model_root(self) -> str | None:
        """The folder or the name of the model that is served, as the server says it; None where it does not."""
        return None

    @abstractmethod
    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion: ...

    @abstractmethod
    async def _completion_wrapper(self, **kwargs: Any) -> Completion: ...

    @abstractmethod
    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> Tokens: ...

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} does not implement get_logprobs; a vLLM server does")

    def _inject_reasoning_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A chat request with what the environment says of reasoning, unless the call says skip_reasoning."""
        kwargs = dict(kwargs)
        if kwargs.pop("skip_reasoning", False) or self.reasoning_config is None:
            return kwargs
        return self.reasoning_config.injected(kwargs, self.config.base_url)

    async def close(self) -> None:
        """Stops looking for the server. A subclass closes its connections too."""
        if self.check_task is not None:
            self.check_task.cancel()
            await asyncio.gather(self.check_task, return_exceptions=True)
            self.check_task = None

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        return await self._router.chat_completion(kwargs)

    async def completion(self, **kwargs: Any) -> Completion:
        return await self._router.completion(kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Tokens:
        return await self._router.tokens_and_logprobs_completion(kwargs)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        return await self._router.get_logprobs(kwargs)

    # -- what a router asks of it --------------------------------------------------------------------------------------

    def places(self, split: str) -> Concurrency:
        return self.sem if split == "train" else self.eval_sem

    def ended(self, split: str, began: int, outcome: Outcome) -> None:
        self.places(split).end(began, outcome)
        self.changed.fire()

    def note(self, split: str, seconds: float, attempts: int) -> None:
        (self.statistics if split == "train" else self.eval_statistics).note(seconds, attempts)

    @property
    def server_healthy(self) -> bool:
        return self._healthy

    @server_healthy.setter
    def server_healthy(self, healthy: bool) -> None:
        if healthy and not self._healthy:
            logger.info("the rollout server %s is there", self.config.base_url)
            self.patience_s = float(self.config.timeout)
        self._healthy = healthy
        self.changed.fire()

    def went_down(self, why: str) -> None:
        """Takes the server out until it is found well again; without a health check it is never taken out."""
        if not self.config.health_check or not self._healthy:
            return
        logger.warning("the rollout server %s is down: %s", self.config.base_url, why)
        self.trouble, self.down_since = why, asyncio.get_running_loop().time()
        self.server_healthy = False
        if self.check_task is None or self.check_task.done():
            self.check_task = asyncio.create_task(self.check_server_status_task())

    # -- what an environment asks of it --------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        return self.tokenizing.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.tokenizing.use(tokenizer)

    @property
    def request_timings(self) -> list[float]:
        return list(self.statistics.timings)

    @property
    def attempts_list(self) -> list[int]:
        return list(self.statistics.attempts)

    async def update_weight(self, weight: float) -> None:
        """The share of its places that this environment may use."""
        for places in (self.sem, self.eval_sem):
            places.weigh(min(1.0, max(0.0, weight)))
        self.changed.fire()

    async def wandb_metrics(self, metrics_dict: dict[str, Any] | None, server_name: str | None) -> dict[str, Any]:
        name = f"server/{server_name or 'server'}"
        found = {} if metrics_dict is None else metrics_dict
        found.update(self.statistics.metrics(f"{name}_request", f"{name}_average_num_attempts"))
        found.update(self.eval_statistics.metrics(f"{name}_eval_request", f"{name}_eval_retry_rate"))
        found[f"{name}_in_flight"] = self.sem.in_flight + self.eval_sem.in_flight
        found[f"{name}_allowed"] = self.sem.allowed
        found[f"{name}_healthy"] = int(self._healthy)
        return found
