"""Several tenants behind one gateway: each its own keys, its own trajectories, and bounds that protect the others.

A tenant's `uid` is `tenant/uid` in the pool, its prompts likewise: it can name nothing of another's. Bounds are those
of this process; where several serve one port, each has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from headrace.gateway.config_files import UID_SEPARATOR, TenantSpec
from headrace.gateway.counters import GatewayCounters
from headrace.gateway.errors import Refusal

#: Seconds' worth of tokens that may be saved up: a call's size is known only once it has ended.
SAVED_TOKENS_S = 60
#: Seconds after which a tenant that has too much under way may try again.
BUSY_RETRY_S = 1


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
        """The bucket as it is now; a clock that goes back adds nothing."""
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
        """What the pool calls a trajectory or a prompt of the tenant."""
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
        """Counts a call's tokens, and takes them from what the tenant may use."""
        self._counters.add("tenant_tokens", self.name, "prompt", by=consumed)
        self._counters.add("tenant_tokens", self.name, "sampled", by=sampled)
        if self._tokens is not None:
            self._tokens = self._tokens.less(self._clock(), consumed + sampled)

    def _too_much(self, bound: str, said: str, wait: float) -> Refusal:
        self._counters.add("tenant_requests", self.name, bound)
        return Refusal(
            f"tenant {self.name!r}: {said}; try again in {wait:.3g} s", 429, code="rate_limited", retry_after=wait
        )
