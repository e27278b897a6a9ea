"""A pool as a run calls it: again and again while it does not answer, for so long, and not beyond the run's end."""

from __future__ import annotations

import uuid
from typing import Any

from headrace.pool.errors import PoolClosed, PoolUnreachable
from headrace.pool.remote import RemotePool
from headrace.trainer.stopping import Outage, Stop, Stopped, Worker

#: Seconds between two tries at a pool that does not answer: the second comes soon, for a connection that was lost.
BACKOFF_S = (0.05, 0.2, 0.5, 1.0)
#: Seconds that a call which ends a run (an acknowledgement, a batch given back) may take: somebody waits for the end,
#: and a busy machine takes a while to answer.
ENDING_S = 5.0
ENDING = frozenset({"ack", "nack"})


class PatientPool:
    """Every call is one of the pool's by name. It returns the pool's answer, raises what the pool refuses it with,
    `PoolUnreachable` once there was no answer for `patience_s`, and `Stopped` where the run is told to stop first.

    The pool given must not try again by itself. A call can be repeated without doing a thing twice: a fetch has a
    request id, and every other call comes to the same when it is sent again.
    """

    def __init__(self, pool: Any, outage: Outage, stop: Stop, patience_s: float) -> None:
        self.pool, self.outage = pool, outage
        self._stop, self._patience_s = stop, patience_s
        # An ended channel is told in answers; that a pool is closed, by its process on the way out.
        self._down = (PoolUnreachable, PoolClosed) if isinstance(pool, RemotePool) else PoolUnreachable
        self._worker = Worker("headrace-pool")

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """From the main thread: it is left as soon as the run is told to stop, also where the pool hangs; what ends a
        lease is then still tried once, where the pool was there."""
        if self._stop.is_set() and self.outage.is_down:
            raise Stopped
        future = self._worker.submit(lambda: self.inline(name, *args, **kwargs))
        return self._stop.result(future, grace_s=ENDING_S if name in ENDING else 0.0)

    def inline(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """From a thread that nobody needs to wait for."""
        if name == "fetch_batch":
            kwargs.setdefault("request_id", uuid.uuid4().hex)
        tries = 0
        while True:
            try:
                found = getattr(self.pool, name)(*args, **kwargs)
            except self._down as error:
                reason = plain(error)
                down_s = self.outage.failed(reason)
                if down_s > self._patience_s:
                    raise PoolUnreachable(f"{self.outage.what} did not answer for {down_s:.0f} s: {reason}") from error
                if self._stop.wait(BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]):
                    raise Stopped from None
                tries += 1
            else:
                self.outage.answered()
                return found

    def close(self) -> None:
        self._worker.close()


def plain(error: Exception) -> str:
    """Why a pool did not answer, in words: `ConnectionRefusedError: [Errno 111] Connection refused` says it twice."""
    lost = error.__cause__
    refused = lost.__cause__ if lost is not None else None
    return refused.strerror.lower() if isinstance(refused, OSError) and refused.strerror else str(lost or error)
