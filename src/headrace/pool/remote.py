"""A pool in another process: the same calls, sent as frames over a transport, with retries that never do a thing twice.

Every call but a backup can be sent again after a lost answer. A step without an index is given a call id, a fetch a
request id, so the pool recognises the second one; an acknowledged lease may be acknowledged again. A long wait is asked
for in pieces, so that a dead connection is noticed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from headrace.data.block import Block, pack_extra
from headrace.pool.calls import AsyncPool, BlockingPool
from headrace.pool.errors import PoolUnreachable
from headrace.pool.operation import PENDING, Change, Operation
from headrace.pool.wire import decode_reply, encode_call

#: Seconds that one request may wait in the pool before it is asked again.
PIECE_S = 20.0
#: Seconds that an answer may take beyond that.
SLACK_S = 30.0
#: Seconds that a call may take which rewrites or copies the journal's files: in this time a disk of 100 MB/s has copied
#: a terabyte, and read the copy. To ask again while the first is carried out would only have it done twice.
#: A pool whose machine is gone is noticed before that, by its connection.
LONG_S = 6 * 3600.0
#: Between tries at a pool that does not answer.
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)


class Unreachable(Exception):
    """A transport could not deliver a call, or lost its answer; the call may or may not have been carried out."""


class Transport(Protocol):
    """Carries a call's frame to a pool and brings the answer's back; `Unreachable` where that fails."""

    address: str

    def call(self, op: str, body: bytes, timeout: float) -> bytes:
        """The answer's frame to the call `body`, which is the operation `op`, within `timeout` seconds."""
        ...

    async def acall(self, op: str, body: bytes, timeout: float, *, waits: bool = True) -> bytes:
        """`call`, awaited. `waits`: the call may wait in the pool; one that does not may travel with others."""
        ...

    def close(self) -> None:
        """Closes this thread's connection."""

    async def aclose(self) -> None:
        """Closes this event loop's connections."""


class RemotePool(BlockingPool):
    """A pool reached by `connect`. `retry_s`: how long a pool that does not answer is tried again."""

    def __init__(self, transport: Transport, *, retry_s: float = 30.0) -> None:
        self._transport = transport
        self._retry_s = retry_s
        self._consumer = uuid.uuid4().hex  # whose hand-outs are remembered apart from others'
        self.aio = AsyncPool(self)

    def __repr__(self) -> str:
        return f"RemotePool({self._transport.address!r})"

    @property
    def address(self) -> str:
        return self._transport.address

    def without_retries(self) -> RemotePool:
        """The same pool; its calls raise `PoolUnreachable` at the first failure."""
        return RemotePool(self._transport, retry_s=0)

    def __enter__(self) -> RemotePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of this thread's connection; the pool itself goes on."""
        self._transport.close()

    async def aclose(self) -> None:
        """Lets go of this event loop's connections."""
        await self._transport.aclose()

    def execute(self, operation: Operation[Any], then: Callable[[Any], Any] | None = None) -> Any:
        call = _Call(operation, retry_s=self._retry_s, consumer=self._consumer)
        if operation.sent_once:
            self._transport.close()  # what fails on a connection that was kept may be sent again on a new one
        while not call.done:
            try:
                call.answered(self._transport.call(operation.name, call.body(), call.timeout_s))
            except Unreachable as error:
                time.sleep(call.failed(error, self._transport.address))
        return then(call.answer) if then is not None else call.answer

    async def execute_async(
        self, operation: Operation[Any], then: Callable[[Any], Any] | None = None, *, pieces: bool = False
    ) -> Any:
        """`execute`, awaited. With `pieces`, a wait that timed out is answered `PENDING`."""
        call = _Call(operation, retry_s=self._retry_s, consumer=self._consumer, relayed=pieces)
        while not call.done:
            try:
                waits = call.may_wait
                data = await self._transport.acall(operation.name, call.body(), call.timeout_s, waits=waits)
                call.answered(data)
            except Unreachable as error:
                await asyncio.sleep(call.failed(error, self._transport.address))
        return then(call.answer) if then is not None else call.answer


class _Call:
    """One call until its answer: what to send next, how long to wait for it, when to give up.

    `relayed`: it is sent on for a caller who asks in pieces itself.
    """

    def __init__(self, operation: Operation[Any], *, retry_s: float, consumer: str, relayed: bool = False) -> None:
        self.answer: Any = None
        self.done = False
        self._retry_s = retry_s
        self._relayed = relayed
        self._tries = 0
        self._unreachable_since: float | None = None
        self._frame: bytes | None = None
        if "request_id" in operation.__struct_fields__ and not operation.request_id:  # type: ignore[attr-defined]
            operation = msgspec.structs.replace(operation, request_id=f"{consumer}/{uuid.uuid4().hex}")
        self._operation = operation
        self._arguments, self._steps = operation.arguments(), operation.steps()
        timeout = self._arguments.get("timeout")
        self._waits = operation.waits and not _wrong(timeout)
        self._until = time.monotonic() + timeout if self._waits and timeout is not None else None
        if self._steps is not None:
            _identify(self._steps)

    @property
    def _left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    @property
    def may_wait(self) -> bool:
        """Whether the pool may hold this call: for room, for groups, or for its disk."""
        return self._operation.takes_long or (self._waits and self._left != 0)

    @property
    def timeout_s(self) -> float:
        """How long the next answer may take."""
        if self._operation.takes_long:
            return LONG_S
        return SLACK_S + (PIECE_S if self._waits else 0.0)

    def body(self) -> bytes:
        if self._waits:
            left = self._left
            piece = PIECE_S if left is None else min(left, PIECE_S)
            arguments = {**self._arguments, "timeout": piece, "pieces": True}
            return encode_call(self._operation.name, arguments, self._steps)
        if self._frame is None:
            self._frame = encode_call(self._operation.name, self._arguments, self._steps)
        return self._frame

    def answered(self, data: bytes) -> None:
        self._unreachable_since, self._tries = None, 0
        answer = decode_reply(data)
        if answer == PENDING and self._waits:
            if self._left is None or self._left > 0:
                return
            if not self._relayed:
                assert isinstance(self._operation, Change)
                answer = self._operation.gave_up()
        self.answer, self.done = answer, True

    def failed(self, error: Unreachable, address: str) -> float:
        """How long to wait before the next try; `PoolUnreachable` where there have been enough."""
        if self._operation.sent_once:
            raise PoolUnreachable(
                f"no answer of the pool at {address}: {error}; {self._operation.sent_once}"
            ) from error
        now = time.monotonic()
        if self._unreachable_since is None:
            self._unreachable_since = now
        if now - self._unreachable_since >= self._retry_s:
            raise PoolUnreachable(f"the pool at {address} did not answer for {self._retry_s:g} s: {error}") from error
        self._tries += 1
        return BACKOFF_S[min(self._tries, len(BACKOFF_S)) - 1]


def _identify(block: Block) -> None:
    """Gives steps that leave their index to the pool a call id, so that a retry is known for one."""
    for head in block.heads:
        if head.step_index < 0:
            extra = head.unpack_extra()
            if extra.call_id is None:
                extra.call_id = uuid.uuid4().hex
                head.extra = pack_extra(extra)


def _wrong(timeout: Any) -> bool:
    """Whether a timeout is invalid: it is then sent as it is, and the pool raises what is wrong with it."""
    return timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0
    )
