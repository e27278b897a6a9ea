"""The agent: a plain multi-turn client of `/v1/chat/completions` that knows a `base_url` and nothing else.

There is no training in it: messages go out, a reply comes back, and when the game is over its reward is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.demo.http import Connection, Failed
from headrace.demo.tasks import NumberGame

__all__ = ["Agent"]

#: Waits before an answer that did not come is asked for again; after the last, the game is given up.
PAUSES_S = (0.1, 0.3, 1.0, 2.0, 4.0)


class Agent:
    """Plays one game after the other; `calls` and `retries` count what it asked for."""

    def __init__(self, address: str) -> None:
        self._connection = Connection(address)
        self.calls = 0
        self.retries = 0

    async def play(self, game: NumberGame, base_path: str) -> None:
        """Plays a game to its end; `base_path` is the path of its base URL."""
        while game.reward is None:
            answer = await self._patiently(
                self._connection.post,
                f"{base_path}/v1/chat/completions",
                {
                    "model": "policy",
                    "messages": game.messages,
                    "temperature": 1.0,
                    "max_tokens": game.task.max_tokens,
                },
            )
            self.calls += 1
            game.reply(answer["choices"][0]["message"]["content"] or "")
        await self._patiently(self._connection.post, f"{base_path}/v1/complete_trajectory", {"reward": game.reward})

    def close(self) -> None:
        self._connection.close()

    async def _patiently(self, ask: Callable[[str, Any], Awaitable[Any]], path: str, body: Any) -> Any:
        for pause in PAUSES_S:
            try:
                return await ask(path, body)
            except Failed:
                self.retries += 1
                await asyncio.sleep(pause)
        return await ask(path, body)
