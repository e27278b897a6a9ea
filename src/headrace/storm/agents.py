"""The storm's agents: they play groups of trajectories in every dialect, and go on whatever happens to what they call.

An agent logs what it is about to do before it does it, and what it was answered. It tries a call again until it is
answered, as SDKs do: with a name (`Idempotency-Key`), or with the count of tries alone.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from headrace.net.async_client import AsyncHttpClient
from headrace.net.http_answer import NoAnswer
from headrace.storm.dialects import DIALECTS, PATHS, Broken, Dialect, PastTurn, StreamReader, body_of, whole_text
from headrace.storm.log import EventLog
from headrace.storm.model_server import answer_in

#: Seconds that one try may take: shorter than the longest freeze and a restart together, so that some are given up.
TRY_S = 20.0
#: Seconds between tries, at most.
MOST_WAIT_S = 0.5
#: Trajectories of a group.
GROUP_SIZES = (1, 2, 3)
MOST_TURNS = 3
#: How often a trajectory fails, a call is hung up on, a conversation forks, a call has a name, an answer is streamed.
FAILS, HANGS_UP, FORKS, NAMED, STREAMED = 0.05, 0.08, 0.15, 0.6, 0.5
#: Answers that say: not now. A 409 of a call under a name says that the same call is still under way.
TRY_AGAIN = frozenset({408, 429, 499, 500, 502, 503, 504, 507})


class StormTenant(msgspec.Struct, frozen=True):
    """Who agents work for: its name in the pool, and the key that they present."""

    name: str
    key: str


class CallGivenUp(Exception):
    """A call was not answered within the storm's patience, or was refused for good; the log says which."""


class StormAgents:
    """All agents of a storm, on one gateway's address."""

    def __init__(
        self,
        address: str,
        log: EventLog,
        tenants: Sequence[StormTenant],
        channels: Sequence[str],
        *,
        seed: int,
        patience_s: float,
    ) -> None:
        """`channels`: the second has its rewards from a reward loop, the others from agents."""
        self._client = AsyncHttpClient(address, total_s=TRY_S, max_bytes=None)
        self._log, self._tenants, self._channels = log, tenants, channels
        self._seed, self._patience_s = seed, patience_s
        self._numbers = itertools.count(1)
        self.stopping = False
        #: Seconds of every answered call, from its first try, with when it was answered.
        self.latencies: list[tuple[float, float]] = []

    async def run(self, number: int, pause_s: float = 0.0, until: float = math.inf) -> None:
        """One agent: plays a group, and more with pauses, until it is told to stop or the monotonic clock says so."""
        tenant = self._tenants[number % len(self._tenants)]
        pair = number // len(self._tenants)
        chance = random.Random(f"agent-{self._seed}-{number}")
        for count in itertools.count():
            if count and (self.stopping or time.monotonic() > until):
                return
            # Every other group has a name that the other tenants use too: nothing of theirs may meet.
            own = f"{tenant.name}-" if count % 2 else ""
            await self._group(tenant, f"{own}g{pair}-{count}", chance)
            if pause_s:
                await asyncio.sleep(chance.random() * 2 * pause_s)

    async def close(self) -> None:
        await self._client.close()

    # -- groups and trajectories ---------------------------------------------------------------------------------------

    async def _group(self, tenant: StormTenant, prompt: str, chance: random.Random) -> None:
        size = chance.choice(GROUP_SIZES)
        channel = chance.choice(self._channels)
        plays = []
        for k in range(size):
            seed = chance.random()
            plays.append(self._rollout(tenant, prompt, f"{prompt}-{k}", size, channel, random.Random(seed)))
        await asyncio.gather(*plays)

    async def _rollout(
        self, tenant: StormTenant, prompt: str, uid: str, size: int, channel: str, chance: random.Random
    ) -> None:
        """One trajectory of a group; another in its place where it fails."""
        for attempt in itertools.count():
            name = f"{uid}-{attempt}"
            try:
                if await self._trajectory(tenant, prompt, name, size, channel, chance):
                    return
            except CallGivenUp:
                return  # the log has it

    async def _trajectory(
        self, tenant: StormTenant, prompt: str, uid: str, size: int, channel: str, chance: random.Random
    ) -> bool:
        """Plays one trajectory to its end; whether it ended well."""
        full = f"{tenant.name}/{uid}"
        worth = round(chance.uniform(-1, 1), 6)
        begin = {
            "trajectory_uid": uid,
            "prompt_uid": prompt,
            "channel": channel,
            "n_rollouts": size,
            "metadata": {"worth": worth},
        }
        self._log.write(
            "trajectory",
            trajectory=full,
            tenant=tenant.name,
            prompt_uid=f"{tenant.name}/{prompt}",
            size=size,
            channel=channel,
            worth=worth,
        )
        await self._control(tenant, "begin", full, "/init_trajectory", begin)
        base = f"/{uid}/{prompt}"
        dialect = chance.choice(DIALECTS)
        history: list[PastTurn] = []
        calls: list[str] = []
        for _ in range(chance.randrange(1, MOST_TURNS + 1)):
            if history and chance.random() < FORKS:
                history, calls = [], []  # the agent forgets what was said: a branch of the same trajectory
            if chance.random() < HANGS_UP:
                await self._hang_up(tenant, full, base, dialect, history)
            if chance.random() < FORKS:  # two at once, of which one goes on
                (turn, call), _ = await asyncio.gather(
                    self._call(tenant, full, base, dialect, history, calls, chance),
                    self._call(tenant, full, base, chance.choice(DIALECTS), [], [], chance),
                )
            else:
                turn, call = await self._call(tenant, full, base, dialect, history, calls, chance)
            history, calls = [*history, turn], [*calls, call]
        if chance.random() < FAILS:
            await self._control(
                tenant, "fail", full, f"{base}/v1/fail_trajectory", {"reason": "the storm's agent gave up"}
            )
            return False
        if chance.random() < 0.2:
            await self._peek(tenant, uid, prompt)
        await self._finish(tenant, full, base, channel, worth, chance)
        return True

    async def _finish(
        self, tenant: StormTenant, full: str, base: str, channel: str, worth: float, chance: random.Random
    ) -> None:
        """Ends a trajectory: with its reward, or with one that comes later, or without: then the reward loop's."""
        path = f"{base}/v1/complete_trajectory"
        if channel == self._channels[1]:
            await self._control(tenant, "complete", full, path, {})
        elif chance.random() < 0.5:
            await self._control(tenant, "complete", full, path, {"reward": worth})
        else:
            await self._control(tenant, "complete", full, path, {})
            await asyncio.sleep(chance.random())
            await self._control(tenant, "reward", full, f"{base}/v1/reward", {"reward": worth})

    async def _peek(self, tenant: StormTenant, uid: str, prompt: str) -> None:
        """Another tenant looks for what it does not have, by a name that is not its own."""
        other = next((one for one in self._tenants if one.name != tenant.name), None)
        if other is None or not uid.startswith(f"{tenant.name}-"):
            return
        body = body_of("chat", [], "who is there", stream=False)
        try:
            answer = await self._client.request(
                "POST", f"/{uid}/{prompt}{PATHS['chat']}", json=body, headers=_key(other)
            )
        except NoAnswer:
            return
        self._log.write("peeked", by=other.name, trajectory=f"{tenant.name}/{uid}", status=answer.status)

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def _call(
        self,
        tenant: StormTenant,
        full: str,
        base: str,
        dialect: Dialect,
        history: Sequence[PastTurn],
        after: Sequence[str],
        chance: random.Random,
    ) -> tuple[PastTurn, str]:
        """One call, tried until it is answered: the turn, and the call's name in the log. Raises `CallGivenUp`."""
        named, stream = chance.random() < NAMED, chance.random() < STREAMED
        continues = after[-1] if after and dialect != "completions" else None
        call = self._announce(tenant, full, dialect=dialect, stream=stream, named=named, after=continues)
        question = f"question {call}"
        body = orjson.dumps(body_of(dialect, history, question, stream=stream))
        headers = {"content-type": "application/json", **_key(tenant)}
        if named:
            headers["idempotency-key"] = call
        begun = time.monotonic()
        for count in itertools.count():
            if count:
                headers["x-stainless-retry-count"] = str(count)
            self._log.write("try", call=call, count=count)
            try:
                text = await self._ask(f"{base}{PATHS[dialect]}", body, headers, dialect, stream)
            except _Refused as refused:
                self._log.write(
                    "refused",
                    what="call",
                    call=call,
                    trajectory=full,
                    status=refused.status,
                    said=refused.said,
                    count=count,
                )
                raise CallGivenUp from None
            except (NoAnswer, Broken, _NotNow) as error:
                self._log.write("failed", call=call, count=count, why=str(error)[:200])
                self._check_patience(begun, "call", full, call)
                await asyncio.sleep(min(0.05 * 2**count, MOST_WAIT_S))
                continue
            self._log.write("answered", call=call, trajectory=full, answer=answer_in(text), text=text)
            self.latencies.append((time.monotonic(), time.monotonic() - begun))
            return PastTurn(question, text), call
        raise AssertionError("a count that never ends has ended")

    def _announce(self, tenant: StormTenant, full: str, **about: Any) -> str:
        """Logs a call that is about to be made; the word that its question carries."""
        call = f"q{self._seed}n{next(self._numbers)}z"
        self._log.write("call", call=call, trajectory=full, tenant=tenant.name, **about)
        return call

    async def _ask(self, path: str, body: bytes, headers: dict[str, str], dialect: Dialect, stream: bool) -> str:
        """One try: the whole text. Raises `NoAnswer`, `Broken`, or one of this module's for another status."""
        if not stream:
            answer = await self._client.request("POST", path, body, headers=headers)
            _check_status(answer.status, answer.body)
            return whole_text(dialect, answer.body)
        reader = StreamReader(dialect)
        async with self._client.stream("POST", path, body, headers=headers) as coming:
            if coming.status != 200:
                _check_status(coming.status, b"".join([part async for part in coming.parts()]))
            async for part in coming.parts():
                reader.feed(part)
        if not reader.ended:
            raise Broken("the stream ended before its end")
        return reader.text

    async def _hang_up(
        self, tenant: StormTenant, full: str, base: str, dialect: Dialect, history: Sequence[PastTurn]
    ) -> None:
        """A call that is left after its first piece."""
        call = self._announce(tenant, full, dialect=dialect, stream=True, named=False, after=None, hung_up=True)
        body = orjson.dumps(body_of(dialect, history, f"question {call}", stream=True))
        headers = {"content-type": "application/json", **_key(tenant)}
        try:
            async with self._client.stream("POST", f"{base}{PATHS[dialect]}", body, headers=headers) as coming:
                async for _ in coming.parts():
                    return
        except NoAnswer:
            return

    async def _control(self, tenant: StormTenant, what: str, full: str, path: str, body: dict[str, Any]) -> None:
        """A request about a trajectory (`begin`, `reward`, `complete`, `fail`), tried until it is answered."""
        begun = time.monotonic()
        for count in itertools.count():
            self._log.write(f"{what}.sent", trajectory=full, count=count, reward=body.get("reward"))
            try:
                answer = await self._client.request("POST", path, json=body, headers=_key(tenant))
                _check_status(answer.status, answer.body)
            except _Refused as refused:
                self._log.write(
                    "refused", what=what, trajectory=full, status=refused.status, said=refused.said, count=count
                )
                raise CallGivenUp from None
            except (NoAnswer, _NotNow) as error:
                self._log.write("failed", what=what, trajectory=full, count=count, why=str(error)[:200])
                self._check_patience(begun, what, full, None)
                await asyncio.sleep(min(0.05 * 2**count, MOST_WAIT_S))
                continue
            told = orjson.loads(answer.body)
            self._log.write(
                f"{what}.acked", trajectory=full, count=count, status=told.get("status"), steps=told.get("steps")
            )
            return

    def _check_patience(self, begun: float, what: str, full: str, call: str | None) -> None:
        waited_s = time.monotonic() - begun
        if waited_s > self._patience_s:
            self._log.write("stuck", what=what, target=full, call=call, waited_s=round(waited_s, 1))
            raise CallGivenUp


class _NotNow(Exception):
    """An answer that asks to come back later."""


class _Refused(Exception):
    """An answer that no retry changes."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status} {said}")
        self.status, self.said = status, said


def _check_status(status: int, body: bytes) -> None:
    if status == 200:
        return
    said = body[:300].decode(errors="replace")
    if status in TRY_AGAIN:
        raise _NotNow(f"{status} {said}")
    raise _Refused(status, said)


def _key(tenant: StormTenant) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant.key}"}
