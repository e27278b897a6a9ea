"""Several tenants behind one gateway: each its own keys, its own trajectories, and bounds that protect the others.

A tenant's `uid` is `tenant/uid` in the pool, its prompts likewise: it can name nothing of another's. Its bounds hold
over all processes that serve one port (`usage`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from headrace.gateway.config_files import UID_SEPARATOR, TenantSpec
from headrace.gateway.counters import GatewayCounters
from headrace.gateway.errors import Refusal
from headrace.gateway.usage import CALLS, TOKENS, TenantUsage, UsageTable

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

    def __init__(
        self,
        name: str,
        spec: TenantSpec,
        counters: GatewayCounters,
        clock: Callable[[], float],
        usage: TenantUsage | None = None,
    ) -> None:
        """`clock` is the same in all processes that share the `usage`; without one it is this process's alone."""
        self.name = name
        self.spec = spec
        self.usage = usage if usage is not None else UsageTable(1).row(0)
        self._counters = counters
        self._clock = clock
        rate, tokens = spec.calls_per_s, spec.tokens_per_s
        self._calls = TokenBucket.full(rate, spec.burst or max(1.0, rate), clock()) if rate is not None else None
        self._tokens = TokenBucket.full(tokens, tokens * SAVED_TOKENS_S, clock()) if tokens is not None else None

    @property
    def in_flight(self) -> int:
        """Its requests under way."""
        return self.usage.under_way

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
        with self.usage.locked():
            self._take()
        self._counters.add("tenant_requests", self.name, "taken")
        try:
            yield
        finally:
            self.usage.add_under_way(-1)

    def _take(self) -> None:
        """Counts one more request; `Refusal` where that is too much."""
        now, most, usage = self._clock(), self.spec.concurrency, self.usage
        if most is not None and (under_way := usage.under_way) >= most:
            raise self._too_much("concurrency", f"{under_way} of its requests are under way, of {most}", BUSY_RETRY_S)
        if self._tokens is not None and (wait := self._now(self._tokens, TOKENS).wait(now, 0)):
            raise self._too_much("tokens", f"it used more than {self._tokens.rate:g} tokens a second", wait)
        if self._calls is not None:
            calls = self._now(self._calls, CALLS)
            wait = calls.wait(now, 1)
            if wait:
                raise self._too_much("rate", f"it makes more than {calls.rate:g} requests a second", wait)
            left = calls.less(now, 1)
            usage.set_bucket(CALLS, left.level, left.since)
        usage.add_under_way(1)

    def _now(self, full: TokenBucket, which: int) -> TokenBucket:
        """A bucket as it was last left, by whichever process."""
        known = self.usage.bucket(which)
        return full if known is None else TokenBucket(full.rate, full.most, *known)

    def used(self, consumed: int, sampled: int) -> None:
        """Counts a call's tokens, and takes them from what the tenant may use."""
        self._counters.add("tenant_tokens", self.name, "prompt", by=consumed)
        self._counters.add("tenant_tokens", self.name, "sampled", by=sampled)
        if self._tokens is not None:
            with self.usage.locked():
                left = self._now(self._tokens, TOKENS).less(self._clock(), consumed + sampled)
                self.usage.set_bucket(TOKENS, left.level, left.since)

    def _too_much(self, bound: str, said: str, wait: float) -> Refusal:
        self._counters.add("tenant_requests", self.name, bound)
        return Refusal(
            f"tenant {self.name!r}: {said}; try again in {wait:.3g} s", 429, code="rate_limited", retry_after=wait
        )
