"""`APIServer`, one rollout server whatever it speaks, and `Router`, which sends each call to one of several.

A call waits, in the order in which calls came, until a healthy server has a free slot. A failure of the server is
retried, on another server at once or on the same one after a pause; a failure of the call itself is raised. A server
that is down is taken out and probed until it is back; callers wait for a signal and do not poll.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp

from headrace.data.errors import InvalidInput, shown
from headrace.envs.server.concurrency import CallOutcome, Concurrency, Signal, Statistics
from headrace.envs.server.config import APIServerConfig, ReasoningConfig
from headrace.envs.server.responses import (
    ChatCompletion,
    NoServerAvailable,
    TextCompletion,
    TokensAndLogprobs,
    Unavailable,
)
from headrace.envs.server.tokenizing import Tokenizing

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: What a call is made for; each has slots of its own on every server.
SPLITS = ("train", "eval")
#: The longest pause before a call is retried: a server that is back is tried again within about this time.
MAX_RETRY_PAUSE_S = 10.0
NO_SERVER_CONFIGURED = "no rollout server is configured; give config_init an APIServerConfig, or say --openai.base_url"


class APIServer(ABC):
    """One rollout server. A subclass defines its health check and how chat, text and token calls are made."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        self.config = config
        self.reasoning_config = reasoning_config
        self.changed = Signal()
        self.sem = Concurrency(config.num_max_requests_at_once)
        self.eval_sem = Concurrency(config.num_requests_for_eval)
        self.statistics = Statistics(config.rolling_buffer_length)
        self.eval_statistics = Statistics(config.rolling_buffer_length)
        self.tokenizing = Tokenizing(config.model_name, config.tokenizer_name)
        #: Unanswered calls that this server has or may still be given.
        self.open_calls = 0
        #: Why it is down.
        self.trouble = ""
        #: Seconds that calls wait for it while it is down; fewer where it has never been up.
        self.down_limit_s = float(config.timeout)
        self.down_since = 0.0
        self.check_task: asyncio.Task[None] | None = None
        self._healthy = True
        self._router = Router([self])

    # What a subclass defines.

    @abstractmethod
    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Runs while the server is down; sets `server_healthy` once it is back."""

    async def health_error(self, within_s: float) -> str | None:
        """Why the server does not answer a health check within so many seconds; None where it does, or has none."""
        return None

    async def model_root(self) -> str | None:
        """The folder or the hub's name of the served model, as the server reports it; None where it does not."""
        return None

    @abstractmethod
    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion: ...

    @abstractmethod
    async def _completion_wrapper(self, **kwargs: Any) -> TextCompletion: ...

    @abstractmethod
    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs: ...

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} does not implement get_logprobs; a vLLM server does")

    def _inject_reasoning_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A chat request with the environment's reasoning fields, unless the call sets skip_reasoning."""
        kwargs = dict(kwargs)
        if kwargs.pop("skip_reasoning", False) or self.reasoning_config is None:
            return kwargs
        return self.reasoning_config.injected(kwargs, self.config.base_url)

    async def close(self) -> None:
        """Ends the health check. A subclass closes its connections too."""
        if self.check_task is not None:
            self.check_task.cancel()
            await asyncio.gather(self.check_task, return_exceptions=True)
            self.check_task = None

    # Calls.

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        return await self._router.chat_completion(kwargs)

    async def completion(self, **kwargs: Any) -> TextCompletion:
        return await self._router.completion(kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        return await self._router.tokens_and_logprobs_completion(kwargs)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        return await self._router.get_logprobs(kwargs)

    # What a router uses.

    def slots(self, split: str) -> Concurrency:
        return self.sem if split == "train" else self.eval_sem

    def release(self, split: str, began: int, outcome: CallOutcome) -> None:
        """Gives a slot back, and wakes calls that wait for one."""
        self.slots(split).end(began, outcome)
        self.changed.fire()

    def record_call(self, split: str, seconds: float, attempts: int) -> None:
        """Adds a successful call to the statistics."""
        (self.statistics if split == "train" else self.eval_statistics).add(seconds, attempts)

    @property
    def server_healthy(self) -> bool:
        return self._healthy

    @server_healthy.setter
    def server_healthy(self, healthy: bool) -> None:
        if healthy and not self._healthy:
            logger.info("the rollout server %s is there", self.config.base_url)
            self.down_limit_s = float(self.config.timeout)
        self._healthy = healthy
        self.changed.fire()

    def mark_down(self, why: str) -> None:
        """Takes the server out until its health check succeeds; one without a health check stays in."""
        if not self.config.health_check or not self._healthy:
            return
        logger.warning("the rollout server %s is down: %s", self.config.base_url, why)
        self.trouble, self.down_since = why, asyncio.get_running_loop().time()
        self.server_healthy = False
        if self.check_task is None or self.check_task.done():
            self.check_task = asyncio.create_task(self.check_server_status_task())

    # What an environment uses.

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
        """Sets the share of its slots that this environment may use, clamped to 0..1."""
        for slots in (self.sem, self.eval_sem):
            slots.weigh(min(1.0, max(0.0, weight)))
        self.changed.fire()

    async def wandb_metrics(self, metrics_dict: dict[str, Any] | None, server_name: str | None) -> dict[str, Any]:
        """The metrics with this server's added: timings, attempts, calls in flight, limit and health."""
        name = f"server/{server_name or 'server'}"
        found = {} if metrics_dict is None else metrics_dict
        found.update(self.statistics.metrics(f"{name}_request", f"{name}_average_num_attempts"))
        found.update(self.eval_statistics.metrics(f"{name}_eval_request", f"{name}_eval_retry_rate"))
        found[f"{name}_in_flight"] = self.sem.in_flight + self.eval_sem.in_flight
        found[f"{name}_allowed"] = self.sem.allowed
        found[f"{name}_healthy"] = int(self._healthy)
        return found


class Slot:
    """One call's slot on a server. `outcome` is how the call ended, which the server's limit is adapted to."""

    def __init__(self, server: APIServer) -> None:
        self.server = server
        self.outcome: CallOutcome = "other"


class Router:
    """Sends calls to servers that may be shared with other routers; each split has its own queue."""

    def __init__(self, servers: Sequence[APIServer]) -> None:
        self.servers = servers
        self._queues = {split: asyncio.Lock() for split in SPLITS}
        self._turn = 0

    async def chat_completion(self, kwargs: dict[str, Any], prefer: APIServer | None = None) -> ChatCompletion:
        answer: ChatCompletion = await self._call("_chat_completion_wrapper", kwargs, prefer)
        return answer

    async def completion(self, kwargs: dict[str, Any], prefer: APIServer | None = None) -> TextCompletion:
        answer: TextCompletion = await self._call("_completion_wrapper", kwargs, prefer)
        return answer

    async def tokens_and_logprobs_completion(
        self, kwargs: dict[str, Any], prefer: APIServer | None = None
    ) -> TokensAndLogprobs:
        answer: TokensAndLogprobs = await self._call("_tokens_and_logprobs_completion_wrapper", kwargs, prefer)
        return answer

    async def get_logprobs(self, kwargs: dict[str, Any], prefer: APIServer | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("_get_logprobs_wrapper", kwargs, prefer)
        return answer

    async def _call(self, name: str, kwargs: dict[str, Any], prefer: APIServer | None) -> Any:
        kwargs = dict(kwargs)
        split = check_split(kwargs.pop("split", "train"))

        async def send(server: APIServer, attempt: int) -> Any:
            given = server._inject_reasoning_kwargs(kwargs) if name == "_chat_completion_wrapper" else dict(kwargs)
            given.pop("skip_reasoning", None)
            return await getattr(server, name)(**{**given, "model": server.config.model_name})

        return await self.run(split, send, prefer)

    async def run(
        self, split: str, send: Callable[[APIServer, int], Awaitable[T]], prefer: APIServer | None = None
    ) -> T:
        """The result of `send(server, attempt)` on a server with a free slot; attempts count from 1.

        Raises the last attempt's error after `max_attempts`, an error of the call itself at once, and
        `NoServerAvailable` where all servers are down for too long.
        """
        for server in self.servers:
            server.open_calls += 1
        try:
            return await self._run(split, send, prefer)
        finally:
            for server in self.servers:
                server.open_calls -= 1

    async def _run(self, split: str, send: Callable[[APIServer, int], Awaitable[T]], prefer: APIServer | None) -> T:
        clock = asyncio.get_running_loop().time
        failed: list[APIServer] = []
        while True:
            async with self.slot(split, prefer, failed) as slot:
                server, began = slot.server, clock()
                try:
                    answer = await send(server, len(failed) + 1)
                except (Unavailable, aiohttp.ClientError, OSError) as error:  # a subclass may have its own client
                    trouble = error.trouble if isinstance(error, Unavailable) else "down"
                    if trouble == "down":
                        server.mark_down(str(error) or type(error).__name__)
                    elif trouble == "overloaded":
                        slot.outcome = "overloaded"
                    failed.append(server)
                    if len(failed) >= server.config.max_attempts:
                        raise
                else:
                    slot.outcome = "ok"
                    server.record_call(split, clock() - began, len(failed) + 1)
                    return answer
            await self._pause(failed)

    async def _pause(self, failed: list[APIServer]) -> None:
        """Waits before a retry, unless a server that has not failed this call can take it now."""
        if any(server.server_healthy and server not in failed for server in self.servers):
            return
        config = failed[-1].config
        await asyncio.sleep(random.random() * min(MAX_RETRY_PAUSE_S, config.retry_s * 2 ** (len(failed) - 1)))

    @asynccontextmanager
    async def slot(
        self, split: str, prefer: APIServer | None = None, failed: Sequence[APIServer] = ()
    ) -> AsyncIterator[Slot]:
        """A slot on a server, as soon as one is free; `prefer` is taken where it is free and has not failed."""
        async with self._queues[split]:
            while (server := self._pick(split, prefer, failed)) is None:
                await self._changed()
            began = server.slots(split).begin()
        slot = Slot(server)
        try:
            yield slot
        finally:
            server.release(split, began, slot.outcome)

    def _pick(self, split: str, prefer: APIServer | None, failed: Sequence[APIServer]) -> APIServer | None:
        """The server with the fewest calls for its weight, of those that have not failed; round robin among equals."""
        free = [server for server in self.servers if server.server_healthy and server.slots(split).free]
        if prefer in free and prefer not in failed:
            return prefer
        fresh = [server for server in free if server not in failed] or free
        if not fresh:
            return None
        load = {id(server): server.slots(split).in_flight / server.config.weight for server in fresh}
        least = min(load.values())
        equal = [server for server in fresh if load[id(server)] == least]
        self._turn += 1
        return equal[self._turn % len(equal)]

    async def _changed(self) -> None:
        """Returns once a server has more slots, or its health changed. Raises where all are down for too long."""
        if not self.servers:
            raise NoServerAvailable(NO_SERVER_CONFIGURED)
        waiting = Signal.any_of([server.changed for server in self.servers])
        if any(server.server_healthy for server in self.servers):
            await waiting
            return
        last = max(self.servers, key=lambda server: server.down_since)
        try:
            async with asyncio.timeout_at(last.down_since + last.down_limit_s):
                await waiting
        except TimeoutError:
            said = "; ".join(f"{server.config.base_url} is down: {server.trouble}" for server in self.servers)
            raise NoServerAvailable(f"no rollout server was there within {last.down_limit_s:g} s: {said}") from None


def check_split(given: Any) -> str:
    """The split; raises `InvalidInput` for what is none."""
    if given not in SPLITS:
        raise InvalidInput(f"split is {shown(given)}; it must be one of {', '.join(SPLITS)}")
    return str(given)
