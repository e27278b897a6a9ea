"""Which of the servers that are left takes an order. Pure: what they look at is handed in, and nothing is awaited."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol, TypeVar

from headrace.gateway.upstream.options import Balancing


class Candidate(Protocol):
    """A server, as far as balancing sees it."""

    @property
    def address(self) -> str: ...

    @property
    def in_flight(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class Balance(Protocol):
    def pick(self, candidates: Sequence[C], sticky: str) -> C:
        """One of the candidates, of which there is at least one."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, candidates: Sequence[C], sticky: str = "") -> C:
        at = self._next % len(candidates)
        self._next = at + 1
        return candidates[at]


class Sticky:
    """All orders with the same `sticky` to one server, by rendezvous hashing: a server that leaves moves only its own.

    An order that nothing is to be kept together with goes round-robin.
    """

    def __init__(self) -> None:
        self._rest = RoundRobin()

    def pick(self, candidates: Sequence[C], sticky: str = "") -> C:
        if not sticky:
            return self._rest.pick(candidates)
        if len(candidates) == 1:
            return candidates[0]
        key = sticky.encode("utf-8", "surrogatepass")
        return max(candidates, key=lambda candidate: weight(candidate.address, key))


class LeastBusy:
    """To the one with the fewest calls in flight; among equals, one after the other."""

    def __init__(self) -> None:
        self._among = RoundRobin()

    def pick(self, candidates: Sequence[C], sticky: str = "") -> C:
        least = min(candidate.in_flight for candidate in candidates)
        return self._among.pick([candidate for candidate in candidates if candidate.in_flight == least])


def weight(address: str, key: bytes) -> bytes:
    """What a server bids for a key; the highest bid has it."""
    return blake2b(key, digest_size=8, key=blake2b(address.encode(), digest_size=16).digest()).digest()


def balance_by(name: Balancing) -> Balance:
    found: dict[Balancing, type[Balance]] = {"round-robin": RoundRobin, "sticky": Sticky, "least-busy": LeastBusy}
    return found[name]()
