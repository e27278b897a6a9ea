"""What takes time: servers that share themselves among calls, and processes that take one thing after the other.

Both are pure: the time is handed in, and what is to happen next is told as a time.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Generic, TypeVar

C = TypeVar("C")


class SharedServer(Generic[C]):
    """A model server: every call in its batch gets tokens at the same pace, which falls with their number, and none
    while a prompt is computed.

    All calls in a batch get the same number of tokens from any moment on, so one count for all (`_served`) tells when
    each is done: the one whose end comes first is on top of a heap.
    """

    def __init__(self, token_s: float, call_s: float, max_calls: int) -> None:
        self._token_s, self._call_s, self._max_calls = token_s, call_s, max_calls
        self._served = 0.0  # tokens that a call had got that was there from the beginning
        self._at = 0.0
        self._held_until = 0.0
        self._batch: list[tuple[float, int, C]] = []
        self._waiting: deque[tuple[float, float, C]] = deque()
        self._number = 0
        #: Seconds in which it computed prompts, held or sampled; the last by the share of a full batch's tokens.
        self.busy_s = 0.0

    @property
    def calls(self) -> int:
        """How many calls it has, waiting ones included."""
        return len(self._batch) + len(self._waiting)

    def add(self, prefill_s: float, tokens: float, call: C, now: float) -> None:
        """Takes a call that samples so many tokens, once its prompt is computed."""
        self._advance(now)
        if len(self._batch) < self._max_calls:
            self._begin(prefill_s, tokens, call)
        else:
            self._waiting.append((prefill_s, tokens, call))

    def hold(self, until: float, now: float) -> None:
        """Samples nothing until a time, as during an exchange of weights."""
        self._advance(now)
        self._held_until = max(self._held_until, until)

    def next_end(self) -> float | None:
        """When the next call ends; None where it has none."""
        if not self._batch:
            return None
        begin = max(self._at, self._held_until)
        return begin + max(0.0, self._batch[0][0] - self._served) * self._pace

    def end_one(self, now: float) -> C:
        """Ends the call whose time has come, and takes one that waits."""
        self._advance(now)
        ended_at, _, call = heappop(self._batch)
        self._served = max(self._served, ended_at)  # what rounding left
        if self._waiting:
            self._begin(*self._waiting.popleft())
        return call

    @property
    def _pace(self) -> float:
        """Seconds between two tokens of a call."""
        return self._token_s + self._call_s * len(self._batch)

    def _begin(self, prefill_s: float, tokens: float, call: C) -> None:
        self._held_until = max(self._held_until, self._at) + prefill_s
        heappush(self._batch, (self._served + tokens, self._number, call))
        self._number += 1

    def _advance(self, now: float) -> None:
        begin = max(self._at, min(self._held_until, now))
        if self._batch:
            self._served += (now - begin) / self._pace
            self.busy_s += begin - self._at + (now - begin) * self._load
        self._at = now

    @property
    def _load(self) -> float:
        """The tokens a second that all calls get, as a share of what a full batch gets."""
        full_pace = self._token_s + self._call_s * self._max_calls
        return len(self._batch) / self._pace * full_pace / self._max_calls


class CpuQueue:
    """Processes of one core each that take what comes in turn."""

    def __init__(self, processes: int) -> None:
        self._free_at = [0.0] * processes
        self.processes = processes
        self.busy_s = 0.0

    def done_at(self, now: float, cpu_s: float) -> float:
        """When work that comes now is done."""
        if not cpu_s:
            return now
        begin = max(now, heappop(self._free_at))
        heappush(self._free_at, begin + cpu_s)
        self.busy_s += cpu_s
        return begin + cpu_s
