"""`ServerManager`: an environment's `self.server`, however many servers there are behind it."""

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
from headrace.envs.server.answers import (
    ChatCompletion,
    Completion,
    Tokens,
    joined_chats,
    joined_completions,
    joined_tokens,
)
from headrace.envs.server.baseline import APIServer
from headrace.envs.server.config import APIServerConfig, ServerBaseline, server_configs
from headrace.envs.server.dummy import ALLOWED, DummyManagedServer
from headrace.envs.server.errors import NoServer
from headrace.envs.server.gateway_server import GatewayServer
from headrace.envs.server.gateway_session import GatewaySession
from headrace.envs.server.harness import ServerHarness
from headrace.envs.server.managed import ManagedServer
from headrace.envs.server.openai_server import PROBE_TIMEOUT_S, OpenAIServer
from headrace.envs.server.reasoning import ReasoningConfig
from headrace.envs.server.router import NONE_CONFIGURED, Router
from headrace.envs.server.sglang_server import SGLangServer
from headrace.envs.server.signal import Signal
from headrace.envs.server.trl_server import TrlVllmServer
from headrace.envs.server.vllm_server import VLLMServer

log = logging.getLogger("headrace.envs")

T = TypeVar("T")
Managed = ManagedServer | GatewaySession | DummyManagedServer

SERVERS: dict[str, type[APIServer]] = {
    "openai": OpenAIServer,
    "vllm": VLLMServer,
    "sglang": SGLangServer,
    "trl": TrlVllmServer,
    "gateway": GatewayServer,
}


class ServerManager:
    """Calls go to the server that has least to do for its weight; `split="eval"` has places of its own.

    `tokenizer` is the environment's, where it has loaded one already.
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
        #: Whether somebody said where the servers are; a node's usual ones may be there or not.
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
        """For servers that name no tokenizer of their own."""
        for server in self.servers:
            if server.config.tokenizer_name in ("", "none"):
                server.tokenizing.use(tokenizer)

    async def close(self) -> None:
        """Lets go of every connection."""
        await asyncio.gather(*(server.close() for server in self.servers))

    async def update_weight(self, weight: float) -> None:
        for server in self.servers:
            await server.update_weight(weight)

    # -- health --------------------------------------------------------------------------------------------------------

    async def ready(self, within_s: float, *, wait: bool) -> None:
        """Tries the servers. Each that does not answer is told with its reason, and looked for from then on.

        With `wait` it returns once one answers, and raises `NoServer`, with every reason, where none has within so many
        seconds; without, calls wait that long. A server without a health check is taken to be there.
        """
        if not all(server.config.health_check for server in self.servers):
            return
        found = await asyncio.gather(*(server.unwell(min(within_s, PROBE_TIMEOUT_S)) for server in self.servers))
        for server, why in zip(self.servers, found, strict=True):
            if why is not None:
                server.patience_s = within_s
                server.went_down(why)
        if not wait or any(server.server_healthy for server in self.servers) or not self.servers:
            return
        log.info("waiting for a rollout server, at most %g s", within_s)
        try:
            async with asyncio.timeout(within_s):
                while not any(server.server_healthy for server in self.servers):
                    await Signal.any_of([server.changed for server in self.servers])
        except TimeoutError:
            said = "; ".join(str(server.trouble) for server in self.servers)
            raise NoServer(f"no rollout server answered within {within_s:g} s: {said}") from None

    async def unanswered(self, within_s: float) -> str | None:
        """Why nobody answers the calls that are open; None where there are none, or where a server is well."""
        if not any(server.open_calls for server in self.servers):
            return None
        found = await asyncio.gather(*(server.unwell(within_s) for server in self.servers))
        return None if None in found else "; ".join(str(why) for why in found)

    async def model_root(self) -> str | None:
        """What the first server that says it serves: a folder, or a name on the hub."""
        for server in self.servers:
            if server.server_healthy and (root := await server.model_root()) is not None:
                return root
        return None

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        return await self._split(kwargs, self._router.chat_completion, joined_chats)

    async def completion(self, **kwargs: Any) -> Completion:
        return await self._split(kwargs, self._router.completion, joined_completions)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Tokens:
        """(prompt ids, ids of each answer, log-probs of each answer, how each ended), as the server had them."""
        return await self._split(kwargs, self._router.tokens_and_logprobs_completion, joined_tokens)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        return await self._router.get_logprobs(kwargs)

    async def _split(
        self,
        kwargs: dict[str, Any],
        call: Callable[[dict[str, Any]], Coroutine[Any, Any, T]],
        join: Callable[[list[T]], T],
    ) -> T:
        """Many answers as several calls, so that several servers share them."""
        n = kwargs.get("n") or 1
        if n <= self.max_n_completions:
            return await call(kwargs)
        sizes = [min(self.max_n_completions, n - begun) for begun in range(0, n, self.max_n_completions)]
        return join(await asyncio.gather(*(call({**kwargs, "n": size}) for size in sizes)))

    # -- sessions ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[APIServer]:
        """The server that has least to do, with one of its places."""
        async with self._router.place("train") as place:
            yield place.server

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
        """A conversation that keeps its tokens. `base_url` names the server that it is to stay with.

        The uids are what a gateway records it under; a rollout of a group has the group's prompt_uid by itself.
        """
        server = self._least_busy(base_url)
        if isinstance(server, GatewayServer):
            server.tokenizing.use(tokenizer)
            session = GatewaySession(server, track_tree, prompt_uid, trajectory_uid)
            try:
                yield session
            finally:
                await session.close()
                session.reset()
            return
        managed: ManagedServer | DummyManagedServer
        if type(server) is OpenAIServer and os.environ.get(ALLOWED, "").lower() in ("1", "true", "yes"):
            warnings.warn(f"{ALLOWED} is set: sequences hold placeholders, not to be trained on", stacklevel=3)
            managed = DummyManagedServer(server, tokenizer, track_tree)
        else:
            managed = ManagedServer(
                Pinned(self._router, server), tokenizer, track_tree, self.tool_parser, preserve_think_blocks
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
            raise NoServer(NONE_CONFIGURED)
        able = [server for server in self.servers if server.server_healthy] or self.servers
        return min(named or able, key=lambda server: server.sem.in_flight / server.config.weight)

    def named(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A scored group with the uids under which a gateway recorded its sequences, where one did."""
        made = dict(group)
        for server in self.servers:
            if isinstance(server, GatewayServer):
                made = server.names.named(made)
        return made


class Pinned:
    """One server of several, for as long as it is well: a conversation's tokens are here, so that any can go on."""

    def __init__(self, router: Router, server: APIServer) -> None:
        self._router, self._server = router, server
        self.config = server.config
        self.tokenizing = server.tokenizing

    @property
    def tokenizer(self) -> Any:
        return self.tokenizing.tokenizer

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Tokens:
        return await self._router.tokens_and_logprobs_completion(kwargs, self._server)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        return await self._router.get_logprobs(kwargs, self._server)


def _made(
    server_class: Callable[..., APIServer], config: APIServerConfig, reasoning: ReasoningConfig | None
) -> APIServer:
    """A server of the class that an environment names, or of the one that its configuration does."""
    chosen = SERVERS[config.server_type] if inspect.isabstract(server_class) else server_class
    return chosen(config, reasoning_config=reasoning)
