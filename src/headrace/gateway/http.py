"""HTTP below the routes: bodies and uids out of requests, JSON and refusals as responses, and a call's own connection.

The status is decided by the first byte. A client that closes its connection, or stops reading for too long, has left:
its call is cancelled, so that nothing is sampled for nobody and no pause or shutdown waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import CoroutineType, TracebackType
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Send

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.json import to_json
from headrace.gateway.errors import Refusal, refusal, too_deep

log = logging.getLogger("headrace.gateway")

T = TypeVar("T")

#: The path of a trajectory's base URL.
BASE_PATH = "/{trajectory_uid}/{prompt_uid}"

KEEP_ALIVE_COMMENT = b": keep-alive\n\n"
JSON_TYPE = (b"content-type", b"application/json")
EVENT_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

#: Seconds after which a call begins to watch its connection: the task that does costs more than quick answers do.
WATCH_AFTER_S = 0.02

Handler = Callable[[Request], Awaitable[Any]]


def path_uid(request: Request, name: str) -> str:
    """A uid of the path, percent-decoded; `InvalidInput` where it is no UTF-8."""
    try:
        return unquote(request.path_params[name], errors="strict")
    except UnicodeDecodeError:
        raise InvalidInput(f"{name} in the path is no UTF-8: {request.path_params[name]!r}") from None


def plain_error(refusal: Refusal) -> dict[str, Any]:
    """The body of an error on a route that speaks no dialect."""
    said: dict[str, Any] = {"detail": str(refusal)}
    if refusal.reason is not None:
        said["code"] = refusal.reason
    return said


def refusal_response(refusal: Refusal, error_body: Callable[[Refusal], dict[str, Any]] = plain_error) -> Response:
    """The answer to a request that is refused."""
    return json_response(error_body(refusal), refusal.status, retry_header(refusal))


def catch_refusals(handler: Handler, error_body: Callable[[Refusal], dict[str, Any]] = plain_error) -> Handler:
    """A handler that answers errors by `error_body`, each with its status; unexpected ones are logged, and 500."""

    async def guarded(request: Request) -> Response:
        try:
            found: Response = await handler(request)
            return found
        except ClientDisconnect:
            return Response(status_code=499)
        except HeadraceError as error:
            return refusal_response(refusal(error), error_body)
        except RecursionError:
            return refusal_response(too_deep(), error_body)
        except Exception as error:
            log.exception("a request failed")
            failed = Refusal(f"the gateway failed at this ({type(error).__name__}); its log says where", 500)
            return refusal_response(failed, error_body)

    guarded.__name__ = handler.__name__
    guarded.__doc__ = handler.__doc__
    return guarded


def decode_body(data: bytes, kind: type[T], *, empty: bool = False) -> T:
    """A body as the struct that a route takes; `Refusal` where it is none. With `empty`, no body is an object without
    fields."""
    if empty and not data.strip():
        data = b"{}"
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise Refusal(f"the body is not what this route takes: {error}", 400, code="invalid_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the body is no JSON: {error}", 400, code="invalid_json") from None
    except RecursionError:
        raise too_deep() from None


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response in JSON, numpy's values among it."""
    return Response(to_json(value), status, headers, "application/json")


def retry_header(refusal: Refusal) -> dict[str, str]:
    """`Retry-After`, where it is worth another try."""
    return {} if refusal.retry_after is None else {"retry-after": str(max(1, math.ceil(refusal.retry_after)))}


class ClientGone(Exception):
    """The client left before it was answered."""


class DisconnectWatch:
    """Watches the client's connection once the body is read; cancels the call when it closes.

    The task inside the `async with` block is cancelled, and the block raises `ClientGone`. After `settle` nothing is
    cancelled any more: the call goes through, whoever listens.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._settled = False
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> DisconnectWatch:
        self._caller = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._begin)
        return self

    def _begin(self) -> None:
        self._watch = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._settled and self._caller is not None:
            self._gone = True
            self._caller.cancel()

    def settle(self) -> None:
        """Cancels nothing from here on: the call goes through, even if its client leaves."""
        self._settled = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settled = True
        self._timer.cancel()
        if self._watch is not None and not self._watch.done():
            self._watch.cancel()
        if self._gone and kind is asyncio.CancelledError:
            if self._caller is not None:
                self._caller.uncancel()
            raise ClientGone from None


class BegunCoroutine(Generic[T]):
    """The rest of a coroutine that ran until it had to wait."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, T]:
        coroutine, waits_for = self._coroutine, self._waits_for
        resume: Callable[[], Any]
        while True:
            try:
                value = yield waits_for
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                resume = partial(coroutine.throw, error)
            else:
                resume = partial(coroutine.send, value)
            try:
                waits_for = resume()
            except StopIteration as done:
                found: T = done.value
                return found


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """Awaits a coroutine; `TimeoutError` after so many seconds. One that need not wait needs no clock."""
    try:
        waits_for = coroutine.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    async with asyncio.timeout(seconds):
        return await BegunCoroutine(coroutine, waits_for)


class StalledWrite:
    """The rest of a write that the client did not take at once; it goes on while it is awaited."""

    __slots__ = ("_rest",)

    def __init__(self, rest: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._rest = rest

    def __await__(self) -> Generator[Any, Any, None]:
        return self._rest().__await__()


class ResponseWriter:
    """Writes one response. `ClientGone` is raised where the client does not read on for `write_timeout_s`.

    Once `expect` was called, a stream in which nothing is written for `keep_alive_s` gets a comment, and begins with it
    where it has not begun.
    """

    def __init__(
        self,
        send: Send,
        keep_alive_s: float,
        write_timeout_s: float,
        stall: Callable[[asyncio.Timeout], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`stall` is entered while the client does not read on, with the time limit of that wait."""
        self._send_message = send
        self._stall = stall
        self._write_timeout_s = write_timeout_s
        self._keep_alive_s = keep_alive_s
        self._headers: list[tuple[bytes, bytes]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._quiet = True
        self.begun = False

    async def whole(self, response: Response) -> None:
        """Sends a response in one piece."""
        self.begun = True
        await self._send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self._send({"type": "http.response.body", "body": response.body})

    async def whole_json(self, value: Any, headers: Mapping[str, str]) -> None:
        """Sends a value as JSON in one piece, with status 200."""
        body = to_json(value)
        raw = [(name.encode("latin-1"), told.encode("latin-1")) for name, told in headers.items()]
        raw += [(b"content-length", b"%d" % len(body)), JSON_TYPE]
        self.begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        await self._send({"type": "http.response.body", "body": body})

    async def relay(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        """Begins a response of another server, whose body `pass_on` sends as it comes."""
        self.begun = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def pass_on(self, data: bytes, *, more: bool = True) -> None:
        """Sends a part of the answer that `relay` began; without `more`, its end."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def expect(self, headers: Mapping[str, str]) -> None:
        """Announces that events will come, under these headers; comments are sent until they do."""
        self._headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._keeper = asyncio.create_task(self._keep_alive())

    def event(self, data: bytes) -> Awaitable[None] | None:
        """Sends events. What it returns is to be awaited before the next: None where the system has taken them, as it
        does while the client reads."""
        self._quiet = False
        if self.begun:
            return self._begin_sending({"type": "http.response.body", "body": data, "more_body": True})
        return StalledWrite(partial(self._write, data, more=True))

    async def last(self, data: bytes) -> None:
        """Sends the last events, and ends the response."""
        self.close()
        await self._write(data, more=False)

    def close(self) -> None:
        """Ends the comments. The response itself is not ended."""
        if self._keeper is not None:
            self._keeper.cancel()
            self._keeper = None

    async def _write(self, data: bytes, *, more: bool) -> None:
        if not self.begun:
            self.begun = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS + self._headers}
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send(self, message: Message) -> None:
        if (stalled := self._begin_sending(message)) is not None:
            await stalled

    def _begin_sending(self, message: Message) -> StalledWrite | None:
        """Sends a message; None where the system took it at once: no clock is needed."""
        sending = self._send_message(message)
        if type(sending) is CoroutineType or isinstance(sending, Coroutine):
            try:
                waits_for = sending.send(None)
            except StopIteration:
                return None
            sending = BegunCoroutine(sending, waits_for)
        return StalledWrite(partial(self._wait_for, sending))

    async def _wait_for(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s) as limit:
                with self._stall(limit):
                    await sending
        except TimeoutError:
            raise ClientGone from None

    async def _keep_alive(self) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(self._keep_alive_s)
            if self._quiet:
                try:
                    await self._write(KEEP_ALIVE_COMMENT, more=True)
                except ClientGone:
                    return  # the next write raises it to the call
