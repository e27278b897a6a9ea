"""A live service in front of a scripted server, and a clock that only goes on when a test says so."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from tests.gateway.kit import Running, told, tree
from tests.gateway.rollout import PATIENCE_S, user

Json = dict[str, Any]
#: More than any test takes: between two of a test's own sweeps, the timer's must not come, which sleeps in real time.
IDLE_S = 6000.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def idle(gateway: Running, clock: Clock, seconds: float = IDLE_S, *, under_way: int = 0) -> None:
    """Time goes on, and the timer wakes up, once no more than so many calls are under way: a client has its answer
    before its call is over."""
    live = gateway.app.state.live

    async def sweep() -> None:
        while live.endings._under_way.total() > under_way:
            await asyncio.sleep(0.001)
        clock.now += seconds
        await live.endings.sweep()

    asyncio.run_coroutine_threadsafe(sweep(), live.timer.loop).result(PATIENCE_S)


def say(gateway: Running, messages: list[Json] | str, **fields: Any) -> httpx.Response:
    """A chat completion under root `/v1`."""
    headers = fields.pop("headers", None)
    given = [user(messages)] if isinstance(messages, str) else messages
    return gateway.post("/v1/chat/completions", {"model": "m", "messages": given, **fields}, headers=headers)


class Talk:
    """One client's conversation, as it remembers it."""

    def __init__(self, **fields: Any) -> None:
        self.messages: list[Json] = []
        self.ids: list[str] = []
        self._fields = fields

    def says(self, gateway: Running, text: str) -> str:
        """What it is answered."""
        self.messages.append(user(text))
        answer = told(say(gateway, self.messages, **self._fields))
        self.ids.append(answer["id"])
        message = answer["choices"][0]["message"]
        self.messages.append(message)
        return str(message["content"])


def conversations(gateway: Running, channel: str = "train") -> list[str]:
    """The trajectories of a channel, in the order in which they began; each is alone in its group."""
    rows = gateway.pool.list_trajectories(channel)["items"]
    assert all(row["trajectory_uid"] == row["prompt_uid"] for row in rows)
    return [row["trajectory_uid"] for row in rows]


def lines(gateway: Running, channel: str = "train") -> list[list[int | None]]:
    """Of each conversation, which step continues which."""
    return [tree(gateway.steps(uid)) for uid in conversations(gateway, channel)]


def complete(gateway: Running) -> list[bool]:
    return [row["complete"] for row in gateway.pool.list_trajectories("train")["items"]]
