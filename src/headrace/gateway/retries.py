"""Which call a retry repeats, where several calls of a trajectory ask the same.

An SDK marks a retry with how often it tried before, and says nothing of which call it was. Equal calls can stand for
each other: it does not matter which of them gets which answer, only that no answer goes to two of them, and none is
sampled that nobody gets. So:

- A call whose client is left without its answer makes one more try expected, under the next count. That try gets the
  answer that was lost on its way, or a new one where there was none.
- A retry that is not expected repeats the only call with its digest, where there is just one.
- Where there are several, and none of them is known to be lost, its first try never came here: it is a new call.

A client that sends an `Idempotency-Key` need not rely on that: the key says which call it is.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from types import TracebackType

import msgspec
from starlette.requests import Request

from headrace.gateway.turn import Turn, digest_of
from headrace.net.server import header

#: How often an SDK tried before; OpenAI's and Anthropic's send it with every call.
RETRY_HEADER = b"x-stainless-retry-count"
#: What a client calls one call, however often it has to make it.
KEY_HEADER = b"idempotency-key"
#: Decimal digits of a count that is taken for one.
MAX_COUNT_DIGITS = 9
#: Digests of a trajectory's calls that are remembered for those who come again, the newest.
MAX_REMEMBERED_CALLS = 1_000


class RetryMark(msgspec.Struct, frozen=True):
    """What a request says of itself: its client's `key` for it, and how often it was tried before."""

    key: str | None = None
    count: int = 0

    @classmethod
    def of(cls, request: Request) -> RetryMark:
        """What the headers of a request say."""
        said = header(request, RETRY_HEADER) or ""
        count = int(said) if said.isdecimal() and len(said) <= MAX_COUNT_DIGITS else 0
        return cls(header(request, KEY_HEADER) or None, count)

    @property
    def repeats(self) -> bool:
        """Whether it may have been answered before."""
        return self.key is not None or self.count > 0

    def digest(self, body: bytes) -> str:
        """The digest that a call and its retries share."""
        named = b"" if self.key is None else self.key.encode("latin-1", "replace") + b"\0"
        return digest_of(named + body)


class ExpectedRetry(msgspec.Struct, frozen=True):
    """One more try. `answer` names what it is to get; None: a new answer, since there was none before."""

    answer: str | None = None


class ExpectedRetries:
    """Tries that will come, by their digest and their count; the newest `most` kinds are remembered."""

    def __init__(self, most: int = MAX_REMEMBERED_CALLS) -> None:
        self._most = most
        self._expected: OrderedDict[tuple[str, int], deque[ExpectedRetry]] = OrderedDict()

    def add(self, digest: str, count: int, answer: str | None = None) -> None:
        """Expects one more try of a call that was tried `count` times before. `answer`: what that try is to get."""
        tries = self._expected.setdefault((digest, count + 1), deque(maxlen=self._most))
        tries.append(ExpectedRetry(answer))
        if len(self._expected) > self._most:
            self._expected.popitem(last=False)

    def take(self, digest: str, count: int) -> ExpectedRetry | None:
        """The expected try that a call with that count is, where there is one; those with an answer first."""
        tries = self._expected.get((digest, count))
        if not tries:
            return None
        found = next((retry for retry in tries if retry.answer is not None), tries[0])
        tries.remove(found)
        if not tries:
            del self._expected[digest, count]
        return found


class RunningCall:
    """A call under way, while it is entered. `answer` is set once its steps are handed over, and cancelled where it
    fails."""

    __slots__ = ("_retries", "answer", "count", "digest")

    def __init__(self, digest: str, count: int, retries: Retries) -> None:
        self.digest = digest
        self.count = count
        self.answer: asyncio.Future[list[Turn]] = asyncio.get_running_loop().create_future()
        self._retries = retries

    async def outcome(self) -> list[Turn] | None:
        """What it is answered with, once it is; None where it fails: its caller is told, and whoever repeats it tries
        anew."""
        await asyncio.wait([self.answer])  # the waiter's own cancellation is none of the answer's, and ends this
        return None if self.answer.cancelled() else self.answer.result()

    def __enter__(self) -> RunningCall:
        self._retries.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._retries.end(self)


class Retries:
    """The calls of one trajectory in this process, and the tries of them that will come."""

    def __init__(self) -> None:
        self.expected = ExpectedRetries()
        self._running: dict[str, list[RunningCall]] = {}
        self._answered: OrderedDict[str, int] = OrderedDict()

    def running(self, digest: str) -> list[RunningCall]:
        """The calls with that digest that are under way, the oldest first."""
        return self._running.get(digest, [])

    def count(self, digest: str) -> int:
        """How many calls with that digest are under way, or were answered."""
        return len(self.running(digest)) + self._answered.get(digest, 0)

    def under_way(self, digest: str, count: int) -> RunningCall:
        """A new call, which is under way while it is entered. Where it ends without an answer, another try is
        expected."""
        return RunningCall(digest, count, self)

    def begin(self, call: RunningCall) -> None:
        """A call is under way."""
        self._running.setdefault(call.digest, []).append(call)

    def end(self, call: RunningCall) -> None:
        """It is not any more."""
        running = self._running[call.digest]
        running.remove(call)
        if not running:
            del self._running[call.digest]
        if not call.answer.done():
            call.answer.cancel()
            self.expected.add(call.digest, call.count)

    def answered(self, call: RunningCall, turns: list[Turn]) -> None:
        """Its steps are handed over: whoever waits for it may have them."""
        self._answered[call.digest] = self._answered.pop(call.digest, 0) + 1
        if len(self._answered) > MAX_REMEMBERED_CALLS:
            self._answered.popitem(last=False)
        call.answer.set_result(turns)
