"""Which of several servers takes a call, and where next when that one fails.

A call waits, in the order in which calls came, until a server that is well has a place for it. What is the server's
fault is tried again, on another server at once or on the same one after a pause; what is the call's fault is raised.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp

from headrace.data.errors import InvalidInput, shown
from headrace.envs.server.answers import ChatCompletion, Completion, Tokens
from headrace.envs.server.concurrency import Outcome
from headrace.envs.server.errors import NoServer, Unavailable
from headrace.envs.server.signal import Signal

if TYPE_CHECKING:
    from headrace.envs.server.baseline import APIServer

T = TypeVar("T")

SPLITS = ("train", "eval")
#: The longest pause before a call is made again.
LONGEST_PAUSE_S = 10.0
NONE_CONFIGURED = "no rollout server is configured; give config_init an APIServerConfig, or say --openai.base_url"


class Place:
    """One call's place on a server; its end is judged by `outcome`."""

    def __init__(self, server: APIServer) -> None:
        self.server = server
        self.outcome: Outcome = "other"


class Router:
    def __init__(self, servers: Sequence[APIServer]) -> None:
        self.servers = servers
        self._lines = {split: asyncio.Lock() for split in SPLITS}
        self._turn = 0

    async def chat_completion(self, kwargs: dict[str, Any], prefer: APIServer | None = None) -> ChatCompletion:
        answer: ChatCompletion = await self._call("_chat_completion_wrapper", kwargs, prefer)
        return answer

    async def completion(self, kwargs: dict[str, Any], prefer: APIServer | None = None) -> Completion:
        answer: Completion = await self._call("_completion_wrapper", kwargs, prefer)
        return answer

    async def tokens_and_logprobs_completion(self, kwargs: dict[str, Any], prefer: APIServer | None = None) -> Tokens:
        answer: Tokens = await self._call("_tokens_and_logprobs_completion_wrapper", kwargs, prefer)
        return answer

    async def get_logprobs(self, kwargs: dict[str, Any], prefer: APIServer | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = await self._call("_get_logprobs_wrapper", kwargs, prefer)
        return answer

    async def _call(self, name: str, kwargs: dict[str, Any], prefer: APIServer | None) -> Any:
        kwargs = dict(kwargs)
        split = split_of(kwargs.pop("split", "train"))

        async def send(server: APIServer, attempt: int) -> Any:
            given = server._inject_reasoning_kwargs(kwargs) if name == "_chat_completion_wrapper" else dict(kwargs)
            given.pop("skip_reasoning", None)
            return await getattr(server, name)(**{**given, "model": server.config.model_name})

        return await self.run(split, send, prefer)

    async def run(
        self, split: str, send: Callable[[APIServer, int], Awaitable[T]], prefer: APIServer | None = None
    ) -> T:
        """What `send` gave, on a server that has a place; called again, with the number of the attempt, if it fails."""
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
            async with self.place(split, prefer, failed) as place:
                server, began = place.server, clock()
                try:
                    answer = await send(server, len(failed) + 1)
                except (Unavailable, aiohttp.ClientError, OSError) as error:
                    trouble = error.trouble if isinstance(error, Unavailable) else "down"
                    if trouble == "down":
                        server.went_down(str(error) or type(error).__name__)
                    elif trouble == "overloaded":
                        place.outcome = "overloaded"
                    failed.append(server)
                    if len(failed) >= server.config.max_attempts:
                        raise
                else:
                    place.outcome = "well"
                    server.note(split, clock() - began, len(failed) + 1)
                    return answer
            await self._pause(failed)

    async def _pause(self, failed: list[APIServer]) -> None:
        """Before a call is made again, unless a server that did not fail it can take it now."""
        if any(server.server_healthy and server not in failed for server in self.servers):
            return
        config = failed[-1].config
        await asyncio.sleep(random.random() * min(LONGEST_PAUSE_S, config.retry_s * 2 ** (len(failed) - 1)))

    @asynccontextmanager
    async def place(
        self, split: str, prefer: APIServer | None = None, failed: Sequence[APIServer] = ()
    ) -> AsyncIterator[Place]:
        """A place on a server, as soon as one is free."""
        async with self._lines[split]:
            while (server := self._pick(split, prefer, failed)) is None:
                await self._changed()
            began = server.places(split).begin()
        place = Place(server)
        try:
            yield place
        finally:
            server.ended(split, began, place.outcome)

    def _pick(self, split: str, prefer: APIServer | None, failed: Sequence[APIServer]) -> APIServer | None:
        """The one that has least to do for its weight, of those that did not fail the call; in turn among equals."""
        free = [server for server in self.servers if server.server_healthy and server.places(split).free]
        if prefer in free and prefer not in failed:
            return prefer
        fresh = [server for server in free if server not in failed] or free
        if not fresh:
            return None
        load = {id(server): server.places(split).in_flight / server.config.weight for server in fresh}
        least = min(load.values())
        equal = [server for server in fresh if load[id(server)] == least]
        self._turn += 1
        return equal[self._turn % len(equal)]

    async def _changed(self) -> None:
        """Returns once a server has more places, or another health. Raises where none is well for too long."""
        if not self.servers:
            raise NoServer(NONE_CONFIGURED)
        waiting = Signal.any_of([server.changed for server in self.servers])
        if any(server.server_healthy for server in self.servers):
            await waiting
            return
        last = max(self.servers, key=lambda server: server.down_since)
        try:
            async with asyncio.timeout_at(last.down_since + last.patience_s):
                await waiting
        except TimeoutError:
            said = "; ".join(f"{server.config.base_url} is down: {server.trouble}" for server in self.servers)
            raise NoServer(f"no rollout server was there within {last.patience_s:g} s: {said}") from None


def split_of(given: Any) -> str:
    if given not in SPLITS:
        raise InvalidInput(f"split is {shown(given)}; it must be one of {', '.join(SPLITS)}")
    return str(given)
