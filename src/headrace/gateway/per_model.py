"""An agent's trajectory as one of each model that sampled for it.

Tokens of two models are never in one tree: each has a trajectory of its own, `uid@name`, under the same prompt, in a
channel of its own. What an agent or its author says of the one holds for all: where it belongs, its reward, its end.
"""

from __future__ import annotations

from typing import Any

from headrace.gateway.gateway import Gateway
from headrace.pool.errors import NotFound
from headrace.pool.operation import Completion


class PerModelTrajectories:
    """Moves, rewards, ends and fails an agent's trajectory together with those of the other models under it."""

    def __init__(self, gateway: Gateway) -> None:
        self._pool = gateway.pool.aio
        self._sessions = gateway.sessions
        self._default = gateway.models.default

    async def place(
        self,
        uid: str,
        prompt: str,
        channel: str,
        metadata: dict[str, Any] | None,
        n_rollouts: int | None,
        *,
        keep: bool,
    ) -> None:
        """Gives the other models' trajectories the prompt, channel and metadata of the agent's; raises the pool's
        `Conflict` where one cannot move. `keep`: metadata that is there stays as it is."""
        for model in self._default.others:
            try:
                there = await self._sessions.find(model.uid_of(uid))
            except NotFound:
                continue
            goes = model.channel_of(channel)
            moves = there.channel != goes
            await self._pool.open(there.uid, prompt, goes, metadata, n_rollouts, move=moves, keep=keep)
            there.channel, there.prompt_uid = goes, prompt

    async def reward(
        self, uid: str, reward: float, index: int | None, source: str | None = None, info: dict[str, Any] | None = None
    ) -> str:
        """Sets the reward of a step of the agent's trajectory; without an index, of the last step of each model's."""
        others = self._default.others if index is None else ()
        told = [await self._rewarded(model.uid_of(uid), reward, source, info) for model in others]
        paid = [status for status in told if status is not None]
        try:
            return await self._pool.reward(uid, reward, index, source=source, info=info)
        except NotFound:
            if not paid:
                raise
            return paid[0]

    async def complete(self, uid: str, reward: float | None, min_steps: int = 0) -> Completion:
        """Completes all of them; the steps are those of all together. One without steps is no rollout of its model: it
        is forgotten, where another has some. `min_steps` is asked for where only the agent's own has any."""
        done: list[Completion] = []
        for model in self._default.others:
            other = model.uid_of(uid)
            steps = await self.steps(other)
            if steps == 0:
                await self._pool.forget(other, erase=False)
            elif steps is not None and model.trained:
                done.append(await self._pool.complete(other, reward))
            elif steps is not None:  # it is in no batch, so it never ends; what it was worth can be read
                status = "ok" if reward is None else await self._pool.reward(other, reward)
                done.append(Completion(status, steps))
        if done and await self.steps(uid) == 0:
            await self._pool.forget(uid, erase=False)
        else:
            done.insert(0, await self._pool.complete(uid, reward, min_steps=0 if done else min_steps))
        return Completion(done[0].status, sum(each.steps for each in done))

    async def fail(self, uid: str, reason: str) -> Completion:
        """Fails all of them; the steps are those of all together."""
        others = [await self._pool.fail(model.uid_of(uid), reason) for model in self._default.others]
        failed = await self._pool.fail(uid, reason)
        return Completion(failed.status, sum(each.steps for each in (failed, *others)))

    async def _rewarded(self, uid: str, reward: float, source: str | None, info: dict[str, Any] | None) -> str | None:
        try:
            return await self._pool.reward(uid, reward, source=source, info=info)
        except NotFound:
            return None

    async def steps(self, uid: str) -> int | None:
        """How many steps a trajectory has; None where there is none, or none any more."""
        try:
            return len(await self._pool.trajectory(uid))
        except NotFound:
            return None
