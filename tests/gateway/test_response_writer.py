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


@pytest.mark.parametrize("taken", [0, 2])
async def test_an_agent_that_does_not_read_on_has_left(taken: int) -> None:
    """At once, or after the answer's head and its first event."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)
        if len(messages) > taken:
            await never(message)

    writer = ResponseWriter(send, keep_alive_s=600, write_timeout_s=0.01)
    writer.expect({})
    if taken:
        first = writer.event(b"data: 1\n\n")
        assert first is not None  # it begins the answer
        await first
    stalled = writer.event(b"data: 2\n\n")
    assert stalled is not None
    with pytest.raises(ClientGone):
        await stalled
    writer.close()


async def test_an_event_that_is_taken_at_once_need_not_be_awaited() -> None:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    writer = ResponseWriter(send, keep_alive_s=600, write_timeout_s=0.01)
    writer.expect({})
    first = writer.event(b"1")
    assert first is not None
    await first
    assert writer.event(b"2") is None
    await writer.last(b"3")
    assert [message.get("body") for message in messages] == [None, b"1", b"2", b"3"]


async def test_a_comment_that_nobody_reads_ends_the_comments_alone() -> None:
    writer = ResponseWriter(never, keep_alive_s=0, write_timeout_s=0.01)
    writer.expect({})
    assert writer._keeper is not None
    await writer._keeper  # it returns, and raises nothing that nobody would hear
