"""Several tenants behind one gateway: each its own keys, its own trajectories, and bounds that protect the others.

A tenant's `uid` is `tenant/uid` in the pool, its prompts likewise: it can name nothing of another's. Bounds are those
of this process; where several serve one port, each has its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace import files
from headrace.data.errors import InvalidInput, shown
from headrace.data.step import check_uid
from headrace.gateway.counters import GatewayCounters
from headrace.gateway.errors import Refusal
from headrace.gateway.tables import fitted
from headrace.pool.config import DEFAULT_CHANNEL

#: Seconds' worth of tokens that may be saved up: a call's size is known only once it has ended.
SAVED_TOKENS_S = 60
#: Seconds after which a tenant that has too much under way may try again.
BUSY_RETRY_S = 1

#: What stands between a tenant's name and the uids that its keys name.
UID_SEPARATOR = "/"
#: A key that begins so is in the environment variable of the name behind it.
ENVIRONMENT_PREFIX = "env:"

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class TenantSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant.

    keys            its agents' keys; `env:NAME` is the value of a variable
    reward_keys     its keys for rewards and completions; without any, its agents' open those too, unless --reward-key
    channels        where its trajectories may go; the first is for those that name none
    calls_per_s     requests a second, of any kind; `burst` at once after a pause, otherwise a second's worth
    tokens_per_s    tokens a second, consumed and sampled, counted when a call has ended; a minute's may be saved up
    concurrency     requests under way at once
    max_body_mb     its largest request
    """

    keys: list[str]
    reward_keys: list[str] = []
    channels: list[str] = msgspec.field(default_factory=lambda: [DEFAULT_CHANNEL])
    calls_per_s: Positive | None = None
    burst: Count | None = None
    tokens_per_s: Positive | None = None
    concurrency: Count | None = None
    max_body_mb: Positive | None = None


class _Top(msgspec.Struct):
    tenants: dict[str, Any]


def read_tenants(path: Path) -> dict[str, TenantSpec]:
    """The tenants of a file by name, their keys in place; an error names the file, the tenant and the key."""
    top = fitted(files.read(path), _Top, str(path))
    found: dict[str, TenantSpec] = {}
    taken: dict[str, str] = {}
    for name, given in top.tenants.items():
        where = f"{path}: tenants.{name}"
        spec = fitted(given, TenantSpec, where)
        try:
            found[name] = _settled(name, spec)
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None
        for key in (*found[name].keys, *found[name].reward_keys):
            other = taken.setdefault(key, name)
            if other != name or (found[name].keys + found[name].reward_keys).count(key) > 1:
                raise InvalidInput(f"{where}: one of its keys stands twice, the other time under {other!r}")
    return found


def _settled(name: str, spec: TenantSpec) -> TenantSpec:
    check_uid(name, "the name")
    if UID_SEPARATOR in name:
        raise InvalidInput(f"the name holds a {UID_SEPARATOR!r}, which ends it where its uids begin; choose another")
    if not spec.keys:
        raise InvalidInput("keys is empty; a tenant without a key can do nothing")
    if not spec.channels:
        raise InvalidInput("channels is empty; name those that its trajectories may go to, the usual one first")
    for channel in spec.channels:
        check_uid(channel, "channels")
    if spec.burst is not None and spec.calls_per_s is None:
        raise InvalidInput("burst says how much of calls_per_s may be saved up; give that too")
    keys, reward_keys = ([_key(key) for key in given] for given in (spec.keys, spec.reward_keys))
    return msgspec.structs.replace(spec, keys=keys, reward_keys=reward_keys)


def _key(given: str) -> str:
    if not given.startswith(ENVIRONMENT_PREFIX):
        found = given
    else:
        variable = given.removeprefix(ENVIRONMENT_PREFIX)
        found = os.environ.get(variable, "")
        if not found:
            raise InvalidInput(f"a key is {shown(given)}, and {variable} is not set in the environment")
    if not found:
        raise InvalidInput("a key is empty")
    return found


class TokenBucket(msgspec.Struct, frozen=True):
    """How much may be used now, where `rate` comes in a second and no more than `most` is saved up. Pure.

    Of `n` seconds, at most `most + rate * n` can be taken. What is only known afterwards may be taken below zero: the
    next one waits until it is paid back.
    """

    rate: float
    most: float
    level: float
    since: float

    @classmethod
    def full(cls, rate: float, most: float, now: float) -> TokenBucket:
        """A bucket in which all is saved up that can be."""
        return cls(rate, most, most, now)

    def at(self, now: float) -> TokenBucket:
        """The bucket as it is now. A clock that goes back brings nothing."""
        passed = max(0.0, now - self.since)
        return TokenBucket(self.rate, self.most, min(self.most, self.level + self.rate * passed), self.since + passed)

    def wait(self, now: float, amount: float) -> float:
        """Seconds until so much can be taken; 0 where it can be now. More than `most` is as much as `most`."""
        lacking = min(amount, self.most) - self.at(now).level
        return max(0.0, lacking / self.rate)

    def less(self, now: float, amount: float) -> TokenBucket:
        """The bucket once so much was taken, whether or not it was there."""
        filled = self.at(now)
        return TokenBucket(self.rate, self.most, filled.level - amount, filled.since)


class Tenant:
    """One tenant at work: its names in the pool, and how much it uses."""

    def __init__(self, name: str, spec: TenantSpec, counters: GatewayCounters, clock: Callable[[], float]) -> None:
        self.name = name
        self.spec = spec
        self.in_flight = 0
        self._counters = counters
        self._clock = clock
        rate, tokens = spec.calls_per_s, spec.tokens_per_s
        self._calls = TokenBucket.full(rate, spec.burst or max(1.0, rate), clock()) if rate is not None else None
        self._tokens = TokenBucket.full(tokens, tokens * SAVED_TOKENS_S, clock()) if tokens is not None else None

    def uid(self, given: str) -> str:
        """What the pool calls a trajectory or a prompt of its."""
        return f"{self.name}{UID_SEPARATOR}{given}"

    def channel(self, given: str | None) -> str:
        """The channel that it asks for; its usual one where it asks for none."""
        channels = self.spec.channels
        if given is not None and given not in channels:
            raise Refusal(
                f"channel {given!r} is not open to tenant {self.name!r}; its channels are {', '.join(channels)}",
                403,
                code="channel_closed",
            )
        return channels[0] if given is None else given

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Room for one more request; 429 where it has used up its own."""
        now, most = self._clock(), self.spec.concurrency
        if most is not None and self.in_flight >= most:
            raise self._too_much(
                "concurrency", f"{self.in_flight} of its requests are under way, of {most}", BUSY_RETRY_S
            )
        if self._tokens is not None and (wait := self._tokens.wait(now, 0)):
            raise self._too_much("tokens", f"it used more than {self._tokens.rate:g} tokens a second", wait)
        if self._calls is not None:
            wait = self._calls.wait(now, 1)
            if wait:
                raise self._too_much("rate", f"it makes more than {self._calls.rate:g} requests a second", wait)
            self._calls = self._calls.less(now, 1)
        self._counters.add("tenant_requests", self.name, "taken")
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def used(self, consumed: int, sampled: int) -> None:
        """What a call turned out to cost."""
        self._counters.add("tenant_tokens", self.name, "prompt", by=consumed)
        self._counters.add("tenant_tokens", self.name, "sampled", by=sampled)
        if self._tokens is not None:
            self._tokens = self._tokens.less(self._clock(), consumed + sampled)

    def _too_much(self, bound: str, said: str, wait: float) -> Refusal:
        self._counters.add("tenant_requests", self.name, bound)
        return Refusal(
            f"tenant {self.name!r}: {said}; try again in {wait:.3g} s", 429, code="rate_limited", retry_after=wait
        )
