"""`Tenant`: whose trajectories are whose, and how much each may do at once and in a second.

A tenant's `uid` is `tenant/uid` in the pool, its prompts likewise: it can name nothing of another's. Bounds are those
of this process; where several serve one port, each has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.gateway.counters import Counters
from headrace.gateway.errors import Refusal
from headrace.gateway.tenants.bucket import Bucket
from headrace.gateway.tenants.spec import SLASH, TenantSpec

#: Seconds' worth of tokens that may be saved up: a call's size is known only once it has ended.
SAVED_S = 60
#: Seconds after which one that has too much under way may try again.
BUSY_S = 1


class Tenant:
    def __init__(self, name: str, spec: TenantSpec, counters: Counters, clock: Callable[[], float]) -> None:
        self.name = name
        self.spec = spec
        self.in_flight = 0
        self._counters = counters
        self._clock = clock
        rate, tokens = spec.calls_per_s, spec.tokens_per_s
        self._calls = Bucket.full(rate, spec.burst or max(1.0, rate), clock()) if rate is not None else None
        self._tokens = Bucket.full(tokens, tokens * SAVED_S, clock()) if tokens is not None else None

    def uid(self, given: str) -> str:
        """What the pool calls a trajectory or a prompt of its."""
        return f"{self.name}{SLASH}{given}"

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
            raise self._too_much("concurrency", f"{self.in_flight} of its requests are under way, of {most}", BUSY_S)
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
