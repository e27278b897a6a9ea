"""A session in the shape of OpenAI's client, for libraries that want one: `client.chat.completions.create(...)`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NoReturn, Protocol

from headrace.envs.server.answers import ChatCompletion, Completion


class Conversing(Protocol):
    async def chat_completion(self, **kwargs: Any) -> ChatCompletion: ...

    async def completion(self, **kwargs: Any) -> Completion: ...


class _Completions:
    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call

    async def create(self, **kwargs: Any) -> Any:
        return await self._call(**kwargs)


class ManagedServerAdapter:
    def __init__(self, managed_server: Conversing, base_url: str) -> None:
        self.base_url = base_url
        self.chat = SimpleNamespace(completions=_Completions(managed_server.chat_completion))
        self.completions = _Completions(managed_server.completion)

    async def post(self, path: str, body: Any = None, cast_to: Any = None) -> NoReturn:
        raise NotImplementedError(f"a managed session has no route {path!r}; use chat.completions or completions")

    def copy(self, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("a managed session cannot be copied; use it as it is")
