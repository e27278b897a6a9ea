"""`ServerManager`, an environment's `self.server`: calls, health and managed conversations over its rollout servers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from headrace.data.errors import InvalidInput
from headrace.envs.server.api_server import NO_SERVER_CONFIGURED, APIServer, Router
from headrace.envs.server.concurrency import Signal
from headrace.envs.server.config import APIServerConfig, ReasoningConfig, ServerBaseline, server_configs
from headrace.envs.server.engine_servers import SGLangServer, TrlVllmServer, VLLMServer
from headrace.envs.server.gateway import GatewayServer, GatewaySession
from headrace.envs.server.harness import ALLOW_DUMMY, DummyManagedServer, ServerHarness
from headrace.envs.server.managed import ManagedServer
from headrace.envs.server.openai_server import PROBE_TIMEOUT_S, OpenAIServer
from headrace.envs.server.responses import (
    ChatCompletion,
    NoServerAvailable,
    TextCompletion,
    TokensAndLogprobs,
    merge_choices,
    merge_tokens,
)

log = logging.getLogger("headrace.envs")

T = TypeVar("T")
Managed = ManagedServer | GatewaySession | DummyManagedServer

#: The class of each `server_type`.
SERVERS: dict[str, type[APIServer]] = {
    "openai": OpenAIServer,
    "vllm": VLLMServer,
    "sglang": SGLangServer,
    "trl": TrlVllmServer,
    "gateway": GatewayServer,
}
#: Those that a gateway may stand in front of.
ENGINES = (OpenAIServer, VLLMServer, SGLangServer, TrlVllmServer)


class ServerManager:
    """Sends calls to the server with the fewest calls for its weight; `split="eval"` has slots of its own.

    `tokenizer` is used by servers whose configuration names none.
    """

    def __init__(
        self,
        configs: ServerBaseline | Sequence[APIServerConfig],
        server_class: Callable[..., APIServer] = APIServer,
        slurm: bool = False,
        testing: bool = False,
        max_n_completions: int = 8,
        reasoning_config: ReasoningConfig | None = None,
        proxy_url: str | None = None,
        use_proxy: bool = False,
        tool_parser: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        if proxy_url or use_proxy:
            raise InvalidInput("a proxy of managed servers is not offered; use a gateway: server_type='gateway'")
        #: Whether addresses were configured; a node's default ones may have no server.
        self.named_servers = isinstance(configs, APIServerConfig) or not isinstance(configs, ServerBaseline)
        self.max_n_completions = max_n_completions
        self.reasoning_config = reasoning_config
        self.tool_parser = tool_parser
        self.servers: list[APIServer] = (
            [_made(server_class, config, reasoning_config) for config in server_configs(configs, slurm=slurm)]
            if not testing
            else [ServerHarness()]
        )
        self.use_tokenizer(tokenizer)
        self._router = Router(self.servers)

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Sets the tokenizer of servers whose configuration names none."""
        for server in self.servers:
            if server.config.tokenizer_name in ("", "none"):
                server.tokenizing.use(tokenizer)

    async def close(self) -> None:
        """Closes every connection."""
        await asyncio.gather(*(server.close() for server in self.servers))

    async def update_weight(self, weight: float) -> None:
        """Sets the share of every server's calls that may be in flight, from 0 to 1."""
        for server in self.servers:
            await server.update_weight(weight)

    # Health.

    async def ready(self, within_s: float, *, wait: bool) -> None:
        """Checks the health of servers that have a check. One that does not answer is marked down, logged with its
        reason, and probed.

        With `wait` it returns once one is healthy, and raises `NoServerAvailable`, with every reason, where none is
        within so many seconds; without, calls wait that long. A server without a health check counts as healthy.
        """
        checked = [server for server in self.servers if server.config.health_check]
        found = await asyncio.gather(*(server.health_error(min(within_s, PROBE_TIMEOUT_S)) for server in checked))
        for server, why in zip(checked, found, strict=True):
            if why is not None:
                server.down_limit_s = within_s
                server.mark_down(why)
        if not wait or any(server.server_healthy for server in self.servers) or not self.servers:
            return
        log.info("waiting for a rollout server, at most %g s", within_s)
        try:
            async with asyncio.timeout(within_s):
                while not any(server.server_healthy for server in self.servers):
                    await Signal.any_of([server.changed for server in self.servers])
        except TimeoutError:
            said = "; ".join(str(server.trouble) for server in self.servers)
            raise NoServerAvailable(f"no rollout server answered within {within_s:g} s: {said}") from None

    async def unanswered(self, within_s: float) -> str | None:
        """Why no server answers the open calls; None where there are no calls, or where a server is healthy."""
        if not any(server.open_calls for server in self.servers):
            return None
        found = await asyncio.gather(*(server.health_error(within_s) for server in self.servers))
        return None if None in found else "; ".join(str(why) for why in found)

    async def model_root(self) -> str | None:
        """The model's folder or name on the hub, from the first healthy server that reports it."""
        for server in self.servers:
            if server.server_healthy and (root := await server.model_root()) is not None:
                return root
        return None

    # Calls.

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """A chat completion by the servers that have room; several answers may come of several servers."""
        return await self._split(kwargs, self._router.chat_completion, merge_choices)

    async def completion(self, **kwargs: Any) -> TextCompletion:
        """A text completion, as `chat_completion`."""
        return await self._split(kwargs, self._router.completion, merge_choices)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        """(prompt ids, ids of each answer, log-probs of each answer, finish reason of each), as the server had them."""
        return await self._split(kwargs, self._router.tokens_and_logprobs_completion, merge_tokens)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Log-probs of a given text or of ids, by one of the servers."""
        return await self._router.get_logprobs(kwargs)

    async def _split(
        self,
        kwargs: dict[str, Any],
        call: Callable[[dict[str, Any]], Coroutine[Any, Any, T]],
        join: Callable[[list[T]], T],
    ) -> T:
        """One call, or several of at most `max_n_completions` answers each, which servers share."""
        n = kwargs.get("n") or 1
        if n <= self.max_n_completions:
            return await call(kwargs)
        sizes = [min(self.max_n_completions, n - begun) for begun in range(0, n, self.max_n_completions)]
        return join(await asyncio.gather(*(call({**kwargs, "n": size}) for size in sizes)))

    # Sessions.

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[APIServer]:
        """The least busy server, with one of its slots held meanwhile."""
        async with self._router.slot("train") as slot:
            yield slot.server

    @asynccontextmanager
    async def managed_server(
        self,
        tokenizer: Any = None,
        base_url: str | None = None,
        preserve_think_blocks: bool = False,
        *,
        track_tree: bool = False,
        prompt_uid: str | None = None,
        trajectory_uid: str | None = None,
    ) -> AsyncIterator[Managed]:
        """A conversation whose tokens are recorded. `base_url` picks the server that it stays with.

        A gateway records it under the uids; by default, `prompt_uid` is the current group's.
        """
        server = self._least_busy(base_url)
        if isinstance(server, GatewayServer) and server.config.record:
            server.tokenizing.use(tokenizer)
            session = GatewaySession(server, track_tree, prompt_uid, trajectory_uid)
            try:
                yield session
            finally:
                await session.close()
                session.reset()
            return
        managed: ManagedServer | DummyManagedServer
        if type(server) is OpenAIServer and os.environ.get(ALLOW_DUMMY, "").lower() in ("1", "true", "yes"):
            warnings.warn(f"{ALLOW_DUMMY} is set: sequences hold placeholders, not to be trained on", stacklevel=3)
            managed = DummyManagedServer(server, tokenizer, track_tree)
        else:
            managed = ManagedServer(
                PinnedServer(self._router, server), tokenizer, track_tree, self.tool_parser, preserve_think_blocks
            )
        try:
            yield managed
        finally:
            managed.reset()

    def _least_busy(self, base_url: str | None) -> APIServer:
        named = [server for server in self.servers if base_url and server.config.base_url == base_url]
        if base_url and not named:
            known = ", ".join(str(server.config.base_url) for server in self.servers)
            raise InvalidInput(f"no server has the base_url {base_url!r}; there are {known}")
        if not self.servers:
            raise NoServerAvailable(NO_SERVER_CONFIGURED)
        able = [server for server in self.servers if server.server_healthy] or self.servers
        return min(named or able, key=lambda server: server.sem.in_flight / server.config.weight)

    def with_uids(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The scored group, with the uids under which a gateway recorded its sequences, where one did."""
        made = dict(group)
        for server in self.servers:
            if isinstance(server, GatewayServer):
                made = server.uids.with_uids(made)
        return made


class PinnedServer:
    """One server of several, preferred while it is healthy. Any other can continue: the tokens are sent each time."""

    def __init__(self, router: Router, server: APIServer) -> None:
        self._router, self._server = router, server
        self.config = server.config
        self.tokenizing = server.tokenizing

    @property
    def tokenizer(self) -> Any:
        return self.tokenizing.tokenizer

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> TokensAndLogprobs:
        return await self._router.tokens_and_logprobs_completion(kwargs, self._server)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        return await self._router.get_logprobs(kwargs, self._server)


def _made(
    server_class: Callable[..., APIServer], config: APIServerConfig, reasoning: ReasoningConfig | None
) -> APIServer:
    """A server of the environment's `server_class`, or of that of its `server_type` where the former is abstract. An
    engine's class says what the environment expects to be served by, and a gateway stands for any engine."""
    by_type = inspect.isabstract(server_class) or (config.server_type == "gateway" and server_class in ENGINES)
    chosen = SERVERS[config.server_type] if by_type else server_class
    return chosen(config, reasoning_config=reasoning)
