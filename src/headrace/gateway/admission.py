"""Which calls are taken where more come than a gateway can carry. The rest are refused at once, before their bodies are
read; a call that was taken is never given up for another.

Three bounds, all measured. Calls: those under way (`--max-in-flight`). Bytes: what calls hold of their requests, their
answers, and what gathers behind clients that do not read on (`--memory-mb`). Time: how far the event loop is behind. A
loop that is behind serves everybody late, `/health` too; so while it is, the calls under way go first. What an answer
comes to is known only once it is sampled: it is counted as it comes, and may go over the bound, which then keeps new
calls out until it is below again. While bytes are scarce, clients that have not read for a while are let go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from headrace.gateway.errors import RETRY_AFTER_S, Refusal

#: Bytes that a call holds whatever it says: its connection's and its server's buffers, its task and its plan.
CALL_BYTES = 64 * 1024
#: Bytes that each byte of a body comes to: its text, messages, ids, the request to the server, and what that repeats.
BODY_FACTOR = 6
#: Bytes that each byte of an answer comes to: beside what is sent, its ids and log-probs until they are recorded.
ANSWER_FACTOR = 2
#: Bytes that may gather behind a client that does not read on: what its server sent (`HIGH_WATER_BYTES`).
STALLED_BYTES = 128 * 1024
#: Bytes of a body that is taken however little room there is, of requests that are no calls: a trainer's word must come
#: through.
SMALL_BODY_BYTES = 64 * 1024

#: Seconds between two looks at how late the event loop is.
LOOK_S = 0.1
#: Seconds that it may be behind: a new connection's request takes three of its rounds, and `/health` has a second.
MAX_BEHIND_S = 0.25
#: Calls under way below which none is refused for that: at 2 ms each, so few cannot hold the loop up for so long.
MIN_QUEUE_CALLS = 128

#: The share of the bytes from which on they are scarce,
SCARCE_SHARE = 0.75
#: and the seconds for which a client may then not read.
SCARCE_STALL_S = 10.0

#: Why a call is refused, as the counter `refused` names it.
CALLS, MEMORY, BEHIND = "calls", "memory", "behind"


#: The code of a body that is refused by its size alone.
TOO_LARGE = "body_too_large"


class Admission:
    """The bounds of one process, and what counts against them. Used in one event loop."""

    def __init__(
        self,
        *,
        max_calls: int,
        max_bytes: int,
        refused: Callable[[str], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`refused` is told why whenever a request is."""
        self.max_calls = max_calls
        self.max_bytes = max_bytes
        self.calls = 0
        self.bytes = 0
        self._refused = refused
        self._clock = clock
        self._stalled: dict[asyncio.Timeout, float] = {}  # since when, the first one first
        self._late_s = 0.0
        self._due = float("inf")  # when the next look is due
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Looks at the running loop from here on."""
        self._due = self._clock() + LOOK_S
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Ends that."""
        if self._timer is not None:
            self._timer.cancel()
        self._due = float("inf")

    def call(self) -> AdmittedCall:
        """Room for one more call, while it is entered; entering raises `Refusal` (503) where there is none."""
        return AdmittedCall(self)

    def request(self) -> HeldBytes:
        """Room for the body of a request that is no call, while it is entered."""
        return HeldBytes(self)

    @property
    def behind_s(self) -> float:
        """Seconds that the event loop is behind, as it was last found or is just now."""
        return max(self._late_s, self._clock() - self._due)

    @property
    def stalled(self) -> int:
        """Clients that an answer waits for."""
        return len(self._stalled)

    @property
    def largest_body(self) -> int:
        """The bytes of the largest body for which there is room where nothing else is held."""
        return max(0, self.max_bytes - CALL_BYTES) // BODY_FACTOR

    def check(self) -> None:
        """Raises `Refusal` where one more call is too many."""
        if self.calls >= self.max_calls:
            raise self.refusal(CALLS, f"{self.calls} calls are under way, and no more are taken at once")
        if self.bytes + CALL_BYTES > self.max_bytes:
            raise self.no_room()
        if self.calls >= MIN_QUEUE_CALLS and self.behind_s > MAX_BEHIND_S:
            raise self.refusal(BEHIND, f"this gateway is {self.behind_s:.2f} s behind with {self.calls} calls")

    def no_room(self) -> Refusal:
        """503: no bytes are left."""
        held, most = self.bytes / 1e6, self.max_bytes / 1e6
        return self.refusal(MEMORY, f"calls under way hold {held:.1f} of {most:g} MB (--memory-mb)")

    def refusal(self, reason: str, said: str) -> Refusal:
        """503, counted by its reason."""
        self._refused(reason)
        return Refusal(f"{said}; try again", 503, code="too_busy", retry_after=RETRY_AFTER_S)

    @contextmanager
    def stall(self, limit: asyncio.Timeout) -> Iterator[None]:
        """While a client does not read on: what gathers behind it is held. Where bytes are scarce, `limit`, under which
        it is waited for, ends early."""
        self._stalled[limit] = self._clock()
        self.bytes += STALLED_BYTES
        try:
            yield
        finally:
            self.bytes -= STALLED_BYTES
            self._stalled.pop(limit, None)

    def _look(self) -> None:
        now = self._clock()
        self._late_s = max(0.0, now - self._due)
        if self._stalled and self.bytes > SCARCE_SHARE * self.max_bytes:
            self.release_stalled(now)
        self._due = now + LOOK_S
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def release_stalled(self, now: float) -> None:
        """Lets go of clients that have not read for `SCARCE_STALL_S`, the longest first, until bytes are no longer
        scarce."""
        spare = self.bytes - SCARCE_SHARE * self.max_bytes
        for limit, since in list(self._stalled.items()):
            if spare <= 0 or now - since < SCARCE_STALL_S:
                return
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())
                spare -= STALLED_BYTES


class HeldBytes:
    """The bytes that one request holds, until its block ends."""

    __slots__ = ("_admission", "bytes")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.bytes -= self.bytes

    def body(self, size: int) -> None:
        """Takes room for so many bytes of a body; `Refusal` where there is none: 413 where there never could be."""
        admission, need = self._admission, BODY_FACTOR * size
        if self.bytes + need > BODY_FACTOR * admission.largest_body + CALL_BYTES:
            most = admission.largest_body / 1e6
            raise Refusal(
                f"the body is larger than the {most:g} MB for which --memory-mb has room", 413, code=TOO_LARGE
            )
        if admission.bytes + need > admission.max_bytes:
            raise admission.no_room()
        self._hold(need)

    def answer(self, size: int) -> None:
        """Counts so many bytes of an answer; they are never refused."""
        self._hold(ANSWER_FACTOR * size)

    def _hold(self, size: int) -> None:
        self.bytes += size
        self._admission.bytes += size


class AdmittedCall(HeldBytes):
    """One call under way."""

    __slots__ = ()

    def __enter__(self) -> Self:
        self._admission.check()
        self._admission.calls += 1
        self._hold(CALL_BYTES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.calls -= 1
        super().__exit__(kind, error, trace)
