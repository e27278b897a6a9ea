"""Simulated agents behind gateways: groups of trajectories, step by step, with rewards that come at the end or later;
some fail, and another takes their place. What they log is what the storm's agents and rollout servers log."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from headrace.data.step import Step
from headrace.pool.operation import Operation
from headrace.pool.operations.produce import FailTrajectory, MarkComplete, OpenTrajectory
from headrace.pool.operations.score import SetReward
from headrace.pool.operations.submit import submit_steps
from headrace.storm.simulation.clients import Client, ClientKilled, GivenUp, World
from headrace.storm.simulation.streams import Streams

#: Trajectories of a group, one of them each time.
GROUP_SIZES = (1, 1, 2, 3)
#: Steps of a trajectory, at most.
MOST_STEPS = 5
#: How often a trajectory fails, is one step without an announcement, names its steps' indices itself, or sends only
#: what a prompt adds to the step before; and how often the last step says itself that it is the last.
FAILS, SINGLE, INDEXED, ADDED_ONLY, ENDS_WITH_STEP = 0.06, 0.3, 0.3, 0.5, 0.2
#: Seconds that a model takes, and that a late reward does, on average.
SAMPLING_S, REWARD_S = 0.06, 0.3
TENANT = "sim"


class SimulatedAgents(Client):
    """One gateway and the agents that call it, one group after the other. `channels`: by name, whether their rewards
    come after the end. `streams`: the gateway is on the pool's machine."""

    def __init__(self, world: World, name: str, channels: dict[str, bool], streams: Streams | None) -> None:
        super().__init__(world, name, streams=streams)
        self._channels = channels
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        """Plays groups until it is told to stop; what was begun is ended."""
        while not self.world.stopping:
            await self._group(f"{TENANT}/{self.name}-g{next(self._numbers)}")
            await asyncio.sleep(self.chance.expovariate(1 / SAMPLING_S))

    async def patiently(self, what: str, target: str, operation: Operation[Any]) -> tuple[Any, int]:
        """`ask`, over kills of the gateway: the agent asks the next one the same."""
        kills = 0
        while True:
            try:
                answer, count = await self.ask(what, target, operation)
                return answer, count + kills
            except ClientKilled:
                kills += 1
                await self.come_back()

    async def _group(self, prompt: str) -> None:
        size = self.chance.choice(GROUP_SIZES)
        channel = self.chance.choice(list(self._channels))
        try:
            if size == 1 and self.chance.random() < SINGLE:
                await self._single(prompt, channel)
            else:
                rollouts = (self._rollout(prompt, f"{prompt}-{k}", size, channel) for k in range(size))
                await asyncio.gather(*rollouts)
        except GivenUp:
            return  # the log has it

    async def _rollout(self, prompt: str, uid: str, size: int, channel: str) -> None:
        """One trajectory of a group; another in its place where it fails."""
        for attempt in itertools.count():
            if await self._trajectory(prompt, f"{uid}-{attempt}", size, channel):
                return

    def _begin(self, prompt: str, uid: str, size: int, channel: str) -> float:
        """Logs a trajectory that is about to begin; what it is worth."""
        worth = self.chance.randrange(-64, 65) / 64
        self.world.trajectories.setdefault(channel, []).append(uid)
        about = {"tenant": TENANT, "prompt_uid": prompt, "size": size, "channel": channel, "worth": worth}
        self.log("trajectory", trajectory=uid, **about)
        return worth

    async def _control(self, what: str, uid: str, operation: Operation[Any], reward: float | None = None) -> None:
        self.log(f"{what}.sent", trajectory=uid, count=0, reward=reward)
        answer, count = await self.patiently(what, uid, operation)
        status = answer if isinstance(answer, str) or answer is None else answer.status
        self.log(f"{what}.acked", trajectory=uid, count=count, status=status, steps=getattr(answer, "steps", None))

    async def _single(self, prompt: str, channel: str) -> None:
        """A trajectory of one step that nobody announced, with its reward and its end."""
        uid = f"{prompt}-single"
        worth = self._begin(prompt, uid, 1, channel)
        await self._step(prompt, uid, channel, _Conversation(indexed=True), worth=worth)
        self.log("begin.acked", trajectory=uid, count=0, status=None, steps=None)
        self.log("complete.acked", trajectory=uid, count=0, status="ok", steps=1)

    async def _trajectory(self, prompt: str, uid: str, size: int, channel: str) -> bool:
        """Plays one trajectory to its end; whether it ended well."""
        chance = self.chance
        worth = self._begin(prompt, uid, size, channel)
        await self._control("begin", uid, OpenTrajectory(uid, prompt, channel, {"worth": worth}, size))
        talk = _Conversation(indexed=chance.random() < INDEXED)
        steps = chance.randrange(1, MOST_STEPS + 1)
        fails = chance.random() < FAILS
        with_step = not fails and chance.random() < ENDS_WITH_STEP
        for number in range(steps):
            ends = with_step and number == steps - 1
            await self._step(prompt, uid, channel, talk, worth=worth if ends else None)
        if fails:
            await self._control("fail", uid, FailTrajectory(uid, "the simulated agent gave up", channel))
            return False
        if with_step:
            self.log("complete.acked", trajectory=uid, count=0, status="ok", steps=steps)
        elif self._channels[channel]:
            await self._control("complete", uid, MarkComplete(uid, None, channel))
            await asyncio.sleep(chance.expovariate(1 / REWARD_S))
            await self._control("reward", uid, SetReward(uid, worth, channel=channel), worth)
        else:
            await self._control("complete", uid, MarkComplete(uid, worth, channel), worth)
        return True

    async def _step(
        self, prompt: str, uid: str, channel: str, talk: _Conversation, *, worth: float | None = None
    ) -> None:
        """One call: sampled, submitted, and answered once the pool has it. `worth`: it is the last, with its reward."""
        chance, number = self.chance, next(self._numbers)
        call, answer = f"{self.name}q{number}", f"{self.name}a{number}"
        self.log("call", call=call, trajectory=uid, tenant=TENANT, named=True, after=talk.call)
        await asyncio.sleep(chance.expovariate(1 / SAMPLING_S))
        first = (int(self.name.removeprefix("gateway")) << 24) + number * 16
        sampled = [first + k for k in range(chance.randrange(1, 8))]
        log_probs = [-chance.randrange(1, 256) / 64 for _ in sampled]
        added = [1000 + chance.randrange(100) for _ in range(chance.randrange(1, 30))]
        asked = [*talk.tokens, *added]
        self.log("sampled", answer=answer, question=call, prompt=asked, response=sampled, log_probs=log_probs)
        short = talk.last is not None and chance.random() < ADDED_ONLY
        step = Step(
            prompt_ids=added if short else asked,
            response_ids=sampled,
            rollout_log_probs=log_probs,
            trajectory_uid=uid,
            prompt_uid=prompt,
            step_index=talk.count if talk.indexed else None,
            call_id=None if talk.indexed else call,
            builds_on=(talk.last, len(talk.tokens)) if short and talk.last is not None else None,
            reward=worth,
            is_last=worth is not None,
        )
        receipt, count = await self.patiently("step", uid, submit_steps([step], channel))
        if receipt.indices[0] < 0:
            said = {"status": "late", "said": "its step came too late", "count": count}
            self.log("refused", what="step", call=call, trajectory=uid, **said)
            raise GivenUp
        self.log("answered", call=call, trajectory=uid, answer=answer, text=answer)
        talk.call, talk.last, talk.tokens = call, receipt.indices[0], [*asked, *sampled]
        talk.count += 1


class _Conversation:
    """What was said in a trajectory: its tokens, how many steps, and the last one's call and index."""

    def __init__(self, *, indexed: bool) -> None:
        self.indexed = indexed
        self.tokens: list[int] = []
        self.count = 0
        self.call: str | None = None
        self.last: int | None = None
