"""HTTP connections as our servers hold them, on top of uvicorn's.

A request's head is bounded in bytes and in time, a body that stops coming ends its connection, and so does an answer
that is not read: whoever only opens connections, never ends a line or reads nothing, holds nothing up. Connections are
bounded in number: beyond it, those that wait longest for a request are closed. `flushed` tells an application when the
system has taken all that it wrote, and `stopping` when the server is to stop, which no message of ASGI does.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import Any, Literal, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

#: Bytes that a request's line and headers may have.
HEAD_BYTES = 64 * 1024
#: Seconds that they may take, and seconds without another byte of a body.
HEAD_S = 30.0
BODY_S = 60.0
#: Seconds that a client may take to read what was written; a server's own bound, where it has one, should be shorter.
WRITE_S = 900.0
#: Bytes of a body that are copied behind its head; more is written by itself.
JOINED_BODY_BYTES = 1 << 16
#: What a client hears for which there is no connection left.
BUSY = b"every connection of this server is in use"

#: What a client that closed only its own side hears, so that one that closed both is found out; it is ignored.
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
#: Seconds before it hears it again: the first time, and at most.
PROBE_S, MOST_PROBE_S = 0.01, 5.0

#: The extensions of ASGI under which an application learns that everything so far was written,
FLUSHED = "headrace.flushed"
#: and that the answer to its request was written whole;
DELIVERED = "headrace.delivered"
#: that the server is to stop, which waits for answers under way;
STOPPING = "headrace.stopping"
#: and under which it ends the connection at once, whatever is left to write.
HANG_UP = "headrace.hang_up"


class ConnectionBound:
    """How many connections a server holds at once, and which of them can be closed to make room: those that wait for a
    request, then those whose clients do not read the end of an answer; of each, the first is the one that does so
    longest."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.waiting: dict[Connection, None] = {}
        self.unread: dict[Connection, None] = {}

    def make_room(self, held: int) -> bool:
        """Closes a connection where more than `most` are `held`; whether there is room then."""
        if held <= self.most:
            return True
        longest = next(iter(self.waiting or self.unread), None)
        if longest is None:
            return False
        self.drop(longest)
        longest.transport.abort()  # a close would wait for what is not read
        return True

    def drop(self, connection: Connection) -> None:
        """A connection is not to be closed for others any more."""
        self.waiting.pop(connection, None)
        self.unread.pop(connection, None)


class UntilClosed(RequestResponseCycle):
    """The answer to a client of HTTP/1.0, which knows no chunks: one whose length nobody told ends with its
    connection."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._unbounded = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self._unbounded:
                self.chunked_encoding = False
        elif self._unbounded and not self.response_complete:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _HeldHead:
    """Stands for a transport while an answer's head is made."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


class JoinedAnswer(RequestResponseCycle):
    """An answer whose head is written together with its body, where that follows at once: a write is a system call that
    wakes the client, and costs as much as anything else about a short answer. A body that does not follow before the
    event loop's next turn finds its head written."""

    _head = b""  # what is held back

    async def send(self, message: Any) -> None:
        if self._head:
            body = message.get("body", b"")
            if len(body) <= JOINED_BODY_BYTES:
                message = {**message, "body": self._head + body}
                self.expected_content_length += len(self._head)
                self._head = b""
            else:
                self._write_head()
        elif not self.response_started and not self.flow.write_paused and self.scope["method"] != "HEAD":
            transport, held = self.transport, _HeldHead()
            self.transport = held  # type: ignore[assignment]  # nothing waits meanwhile
            try:
                await super().send(message)
            finally:
                self.transport = transport
            if self.chunked_encoding is False and self.expected_content_length:
                self._head = held.data
                asyncio.get_running_loop().call_soon(self._write_head)
            elif held.data:
                transport.write(held.data)
            return
        await super().send(message)

    def _write_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self.transport.is_closing():
            self.transport.write(head)


class Connection(HttpToolsProtocol):
    """One client's connection. What it waits for (a request's head, the rest of a body, or nothing) has a deadline."""

    head_s = HEAD_S
    body_s = BODY_S
    write_s = WRITE_S
    bound: ConnectionBound | None = None
    _awaited: Literal["head", "body"] | None
    _unread_since: float | None = None  # when a write began that the client has not read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # writing goes on once the system has all that was written
        self._failed = False
        self._lost = asyncio.Event()
        self._stopping = asyncio.Event()
        self._head = 0
        self._begun = False  # a request, and not all of it is here
        self._awaits("head", self.head_s)
        self._timer = self.loop.call_later(min(self.head_s, self.write_s), self._look)
        if self.bound is not None:
            if self.bound.make_room(len(self.connections)):
                self.bound.waiting[self] = None
            else:
                self._refuse(503, BUSY.decode())

    def connection_lost(self, exc: Exception | None) -> None:
        if self.bound is not None:
            self.bound.drop(self)
        self._failed = exc is not None or self.flow.write_paused  # something was left to write
        self._timer.cancel()
        super().connection_lost(exc)
        self._lost.set()

    def shutdown(self) -> None:
        super().shutdown()
        self._stopping.set()

    async def flushed(self) -> bool:
        """Waits until nothing is left to write; False where the connection broke before."""
        if self.flow.write_paused:
            await self.flow.drain()
        if self.transport.is_closing():  # by us, or because a write failed: `connection_lost` tells which
            await self._lost.wait()
        return not self._failed

    async def _delivered(self, cycle: weakref.ref[RequestResponseCycle]) -> bool:
        """Whether all of an answer was written before its connection broke; waits until that is known. Asked by who
        answers, while the cycle is there."""
        answering = cycle()
        return answering is not None and answering.response_complete and await self.flushed()

    # -- what comes ----------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._awaited == "body":
            self._awaits("body", self.body_s)
        self._head += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._awaited == "head" and self._head > HEAD_BYTES:
            self._refuse(431, f"the request's line and headers are longer than {HEAD_BYTES} bytes")
        elif self._awaited is None and self._is_idle():
            # The body of a request that was answered before it came, or line ends between requests: whatever comes
            # ends the time that an idle connection is kept, and no answer follows that would give it that again.
            self._awaits("head", self.head_s)

    def _is_idle(self) -> bool:
        """Whether nothing is under way here, and nothing bounds how long that lasts."""
        cycle: RequestResponseCycle | None = self.cycle
        return (cycle is None or cycle.response_complete) and self.timeout_keep_alive_task is None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True
        self.scope["extensions"] = {
            FLUSHED: {"wait": self.flushed},
            STOPPING: {"wait": self._stopping.wait},
            HANG_UP: {"now": self.transport.abort},
        }
        self._awaits("head", self.head_s)

    def on_headers_complete(self) -> None:
        self._awaits("body", self.body_s)
        if self.bound is not None:
            self.bound.drop(self)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = UntilClosed  # its task is made by now, and has not begun
        else:
            self.cycle.__class__ = JoinedAnswer
        # Weakly: the cycle has the scope, and neither is to wait for the garbage collector.
        self.scope["extensions"][DELIVERED] = {"wait": partial(self._delivered, weakref.ref(self.cycle))}

    def on_message_complete(self) -> None:
        self._awaited, self._head, self._begun = None, 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._say_idle()

    def pause_writing(self) -> None:
        self._unread_since = self.loop.time()
        super().pause_writing()
        self._say_idle()

    def resume_writing(self) -> None:
        self._unread_since = None
        super().resume_writing()
        self._say_idle()

    def _say_idle(self) -> None:
        """Tells the bound where no request is under way here: what is left is to be read, or a request to come."""
        cycle: RequestResponseCycle | None = self.cycle
        if self.bound is not None and cycle is not None and cycle.response_complete:
            self.bound.drop(self)
            if self.flow.write_paused:
                self.bound.unread[self] = None
            elif not self.transport.is_closing():
                self.bound.waiting[self] = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client sends nothing more: it left, or it only says so and waits for its answer. Until that begins, one
        that left is told from one that waits by what it says to an interim answer, which no client minds."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.more_body or cycle.response_started or self.pipeline:
            return False
        cycle.keep_alive = False
        if self.scope["http_version"] == "1.1":
            self._ask_whether_there(cycle, PROBE_S)
        return True

    def _ask_whether_there(self, cycle: RequestResponseCycle, wait_s: float) -> None:
        """Writes until the answer begins, or writing fails: then the connection is lost, as ever."""
        if not (cycle.response_started or cycle.disconnected or self.transport.is_closing()):
            self.transport.write(INTERIM)
            self.loop.call_later(wait_s, self._ask_whether_there, cycle, min(2 * wait_s, MOST_PROBE_S))

    # -- what does not -------------------------------------------------------------------------------------------------

    def _awaits(self, what: Literal["head", "body"], within_s: float) -> None:
        self._awaited = what
        self._deadline = self.loop.time() + within_s

    def _look(self) -> None:
        """Ends what kept its deadline not; one timer a connection, set anew no more often than it has to be."""
        now = self.loop.time()
        if self._unread_since is not None and now - self._unread_since >= self.write_s:
            self.transport.abort()  # a close would wait for what is not read
            return
        if self._awaited == "body" and self.flow.read_paused:
            self._deadline = now + self.body_s  # it is the application that does not read on
        if self._awaited is not None and self._deadline <= now and not self.transport.is_closing():
            if self._awaited == "head" and not self._begun:
                self.transport.close()  # nobody asked anything
            else:
                self._refuse(408, f"the rest of the request's {self._awaited} did not come in time")
            return
        wait_s = self._deadline - now if self._awaited is not None else self.head_s
        if self._unread_since is not None:
            wait_s = min(wait_s, self._unread_since + self.write_s - now)
        self._timer = self.loop.call_later(max(wait_s, 0.01), self._look)

    def _refuse(self, status: int, why: str) -> None:
        """Answers where no answer has begun, and hangs up."""
        cycle = cast("RequestResponseCycle | None", self.cycle)  # there is none before the first request's head
        if cycle is None or cycle.response_complete or not cycle.response_started:
            text = why.encode()
            head = f"HTTP/1.1 {status} {REASONS[status]}\r\ncontent-type: text/plain\r\ncontent-length: {len(text)}\r\n"
            head += "retry-after: 1\r\n" if status == 503 else ""
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + text)
        self.transport.close()


def bounded_connection(most: int, write_s: float) -> type[Connection]:
    """The kind of connection of a server that holds so many at once, and whose clients may take so long to read."""

    class BoundedConnection(Connection):
        bound = ConnectionBound(most)

    BoundedConnection.write_s = write_s
    return BoundedConnection


REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


async def flushed(scope: Any) -> bool:
    """Waits until the system has taken all of the answer to a request; False where its connection broke before. True
    at once under a server that cannot tell."""
    return await _told(scope, FLUSHED)


async def delivered(scope: Any) -> bool:
    """Once all of an answer is sent: whether the system has taken it whole, before its connection broke. True at once
    under a server that cannot tell."""
    return await _told(scope, DELIVERED)


async def stopping(scope: Any) -> None:
    """Waits until the server that answers a request is to stop; for ever under one that cannot tell."""
    found = scope.get("extensions", {}).get(STOPPING)
    wait = asyncio.Event().wait if found is None else found["wait"]
    await wait()


async def hang_up(scope: Any) -> None:
    """Ends a request's connection without waiting for what is not read; nothing under a server that cannot."""
    found = scope.get("extensions", {}).get(HANG_UP)
    if found is not None:
        found["now"]()
        await asyncio.sleep(0)  # by then it is lost, and nobody wonders why its answer has no end


async def _told(scope: Any, extension: str) -> bool:
    found = scope.get("extensions", {}).get(extension)
    return True if found is None else bool(await found["wait"]())
