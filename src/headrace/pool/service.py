"""Answering calls that arrive as frames, for whichever shell carried them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from headrace.data.errors import HeadraceError
from headrace.data.frame import Buffer
from headrace.pool.embedded import DataPool
from headrace.pool.errors import InternalError
from headrace.pool.operations import from_wire
from headrace.pool.operations.control import BackUpJournal
from headrace.pool.remote import RemotePool
from headrace.pool.wire import decode_call, encode_error, encode_reply

log = logging.getLogger("headrace.pool")


async def _unless(gone: Awaitable[object], call: Awaitable[bytes]) -> bytes:
    """What the call returns. It is cancelled where `gone` returns first (`CallerGone`): a fetch that waits must not
    take a batch for a caller that hung up."""
    left, task = asyncio.ensure_future(gone), asyncio.ensure_future(call)
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        raise CallerGone
    finally:
        left.cancel()


class CallerGone(Exception):
    """The caller hung up before its call was answered; the call was cancelled."""


async def answer(
    pool: DataPool | RemotePool,
    data: Buffer,
    gone: Callable[[], Awaitable[object]] | None = None,
    backup_to: Callable[[str], str] = str,
) -> tuple[bytes, HeadraceError | None]:
    """The answer's frame, and the error that it carries, if it carries one.

    `gone` returns when the caller has hung up: a call that may have to wait then ends with `CallerGone`, which `gone`
    raises itself where the caller had left before. `backup_to` says where a backup goes for which the caller named a
    folder, or raises why it may not.
    """
    try:
        operation, pieces = from_wire(*decode_call(data))
        if isinstance(operation, BackUpJournal):
            operation = BackUpJournal(backup_to(operation.to))
        may_wait = getattr(operation, "timeout", None)
        left = gone() if gone is not None and may_wait else None
        reply = pool.execute_async(operation, encode_reply, pieces=pieces)
        return await (reply if left is None else _unless(left, reply)), None
    except HeadraceError as error:
        return encode_error(error), error
    except CallerGone:
        raise
    except Exception as error:
        # Not the caller's doing: the log has where, the caller that it happened.
        log.exception("a call failed")
        failed = InternalError(f"the pool failed at this call ({type(error).__name__}: {error}); its log says where")
        return encode_error(failed), failed
