"""An answer on its way to an agent that reads, or does not."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import Response
from starlette.types import Message

from headrace.gateway.http import ClientGone, ResponseWriter


async def never(message: Message) -> None:
    """The buffers are full, and nobody reads."""
    await asyncio.Event().wait()


async def test_an_agent_that_does_not_read_a_whole_answer_has_left() -> None:
    writer = ResponseWriter(never, keep_alive_s=600, write_timeout_s=0.01)
    with pytest.raises(ClientGone):
        await writer.whole(Response(b"{}"))


async def test_an_agent_that_does_not_read_on_has_left() -> None:
    writer = ResponseWriter(never, keep_alive_s=600, write_timeout_s=0.01)
    writer.expect({})
    with pytest.raises(ClientGone):
        await writer.event(b"data: {}\n\n")
    writer.close()


async def test_a_comment_that_nobody_reads_ends_the_comments_alone() -> None:
    writer = ResponseWriter(never, keep_alive_s=0, write_timeout_s=0.01)
    writer.expect({})
    assert writer._keeper is not None
    await writer._keeper  # it returns, and raises nothing that nobody would hear
