"""One exchange with one server: an order sent, its answer read whole or piece by piece.

Whatever a server does, what comes out is choices, `Refused` (the order's fault) or `Failed` (the server's), and the
connection of an exchange that did not end as it should is closed, which is how vLLM learns that nobody listens.
"""

from __future__ import annotations

import asyncio

import msgspec
from yarl import URL

from headrace.data.step import IntArray
from headrace.gateway.upstream.client import SMALL, Client, TooLarge, read_up_to, unreachable, words
from headrace.gateway.upstream.errors import Failed, Refused
from headrace.gateway.upstream.http1 import Dropped, HttpError, Response, Unconnected
from headrace.gateway.upstream.patience import Patience
from headrace.gateway.upstream.server import Server
from headrace.gateway.upstream.sse import Events
from headrace.gateway.upstream.types import Sampled, Spans
from headrace.gateway.upstream.versions import extended
from headrace.gateway.upstream.wire import Asked, Said, Wire, said

#: The server's trouble rather than the request's: its key, its routes, the name that it serves.
DENIED = (401, 403, 404, 405)
#: How long the end of a stream may stay away after [DONE] before its connection is given up.
TAIL_S = 1.0


class Busy(Failed):
    """The server has too much to do; it may say when to come again."""

    code = "rollout_server_busy"

    def __init__(self, message: str, kind: str = "busy", retry_after_s: float | None = None) -> None:
        super().__init__(message, kind)
        self.retry_after_s = retry_after_s


class _Choice:
    """What a stream has brought of one choice."""

    __slots__ = ("begun", "finished", "spans", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.spans: Spans = ()
        self.begun = self.finished = False


class Call:
    def __init__(
        self, client: Client, server: Server, url: URL, wire: Wire, asked: Asked, patience: Patience, most_bytes: int
    ) -> None:
        self.server = server
        #: Known when it began.
        self.version = server.version
        self._client, self._url, self._wire, self._asked = client, url, wire, asked
        self._patience, self._most_bytes = patience, most_bytes
        self._response: Response | None = None
        self._open = True
        server.in_flight += 1
        server.calls += 1

    def close(self) -> None:
        """Ends the exchange wherever it is. What was read to its end keeps its connection for the next."""
        if self._open:
            self._open = False
            self.server.in_flight -= 1
        if self._response is not None:
            self._response.close()
            self._response = None

    # -- whole ---------------------------------------------------------------------------------------------------------

    async def whole(self) -> list[Sampled]:
        data = await self._patience.wait(self._exchange(), self.server.address)
        asked = self._asked
        try:
            choices = self._wire.whole(asked, data, self.version)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._malformed(error) from error
        if len(choices) > 1:
            choices.sort(key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(asked.choices)):
            indices = [choice.index for choice in choices]
            raise self._failed(f"answered with the choices {indices} where {asked.choices} were asked for", "malformed")
        for choice in choices:
            choice.server = self.server.address
            self._looked(choice)
            if choice.finish_reason is None:
                raise self._failed("answered without a finish_reason", "malformed")
            if choice.spans:
                self.server.told(choice.spans[-1][1])
            elif choice.ids:
                choice.spans = ((0, self.version),)
        self.close()
        return choices

    async def _exchange(self) -> bytes:
        response = await self._sent(stream=False)
        try:
            return await read_up_to(response, self._most_bytes)
        except TooLarge as error:
            raise self._failed(f"sent {error}", "too_large") from None
        except HttpError as error:
            raise self._failed(f"cut its answer off: {words(error)}", "cut") from error

    # -- in pieces -----------------------------------------------------------------------------------------------------

    async def open(self) -> list[Sampled]:
        """Sends the order; what comes first of the answer."""
        self._events = Events()
        self._choices = [_Choice() for _ in range(self._asked.choices)]
        self._consumed: IntArray | None = None
        self._size = 0
        self._ended = self._seen = False
        await self._patience.wait(self._sent(stream=True), self.server.address)
        pieces = await self.more()
        self._seen = True
        return pieces

    async def more(self) -> list[Sampled]:
        """What is new; nothing once all of it was told."""
        assert self._response is not None
        content = self._response
        while not self._ended:
            try:
                chunk = await self._patience.wait(content.readany(), self.server.address)
            except HttpError as error:
                raise self._failed(f"cut its answer off: {words(error)}", "cut") from error
            if not chunk:
                if not all(choice.finished for choice in self._choices):
                    raise self._failed("ended its answer before it was finished", "cut")
                self._ended = True
                break
            self._size += len(chunk)
            if self._size > self._most_bytes:
                raise self._failed(f"sent an answer of more than the {self._most_bytes} bytes allowed", "too_large")
            pieces: list[Sampled] = []
            for data in self._events.feed(chunk):
                if data == b"[DONE]":
                    self._ended = True
                    pieces += self._unfinished()
                    break
                pieces += self._read(data)
            if pieces:
                return pieces
        await self._tail(content)
        return []

    def _read(self, data: bytes) -> list[Sampled]:
        try:
            pieces = self._wire.piece(self._asked, data, self.version)
        except Said as error:
            raise self._refusal(error) from None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._malformed(error) from error
        for piece in pieces:
            self._track(piece)
        return pieces

    def _track(self, piece: Sampled) -> None:
        if not 0 <= piece.index < len(self._choices) or self._choices[piece.index].finished:
            raise self._failed(f"sent a piece of choice {piece.index}, which is not open", "malformed")
        choice = self._choices[piece.index]
        if piece.consumed is not None:
            self._consumed = piece.consumed
        if not choice.begun:
            choice.begun = True
            piece.consumed = self._consumed  # one wire tells it with the first choice only
            self._looked(piece)
        if piece.ids:
            choice.spans = extended(choice.spans, choice.tokens, self.server.version)
            choice.tokens += len(piece.ids)
        if piece.spans and piece.spans[-1][0] < choice.tokens:
            choice.spans = piece.spans
            self.server.told(piece.spans[-1][1])
        piece.spans = choice.spans
        piece.server = self.server.address
        choice.finished = piece.finish_reason is not None

    def _looked(self, beginning: Sampled) -> None:
        """Of a prompt with images, the server must tell what it consumed: else nobody knows that it saw them."""
        if self._asked.order.images and beginning.ids and beginning.consumed is None:
            raise self._failed("did not tell the ids that it made of a prompt with images", "malformed")

    def _unfinished(self) -> list[Sampled]:
        """vLLM says nothing at all of a choice that was aborted before its first token."""
        pieces = []
        for index, choice in enumerate(self._choices):
            if choice.finished:
                continue
            if choice.tokens:
                raise self._failed(f"ended its answer before choice {index} was finished", "cut")
            choice.finished = True
            pieces.append(Sampled(index, [], [], "", "abort", server=self.server.address))
        return pieces

    async def _tail(self, content: Response) -> None:
        """Reads what is left, so that the connection can be used again."""
        try:
            async with asyncio.timeout(TAIL_S):
                while part := await content.readany():
                    self._size += len(part)
                    if self._size > self._most_bytes:
                        break
        except (TimeoutError, HttpError):
            pass  # the answer is whole; only its connection is lost
        self.close()

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    async def _sent(self, *, stream: bool) -> Response:
        """The answer's beginning, with a status that promises an answer."""
        body = self._wire.body(self._asked, self.server.model, stream=stream)
        try:
            response = await self._client.post(self._url, body)
        except (Unconnected, Dropped) as error:
            raise self._failed(unreachable(error), "unreachable") from error
        except HttpError as error:
            raise self._failed(f"does not speak HTTP as it should: {error}", "malformed") from error
        self._response = response
        if response.status != 200:
            try:
                data = await read_up_to(response, SMALL)
            except (HttpError, TooLarge):
                data = b""
            raise self._refusal(said(response.status, data), response.headers.get("retry-after"))
        return response

    def _refusal(self, error: Said, retry_after: str | None = None) -> Refused | Failed:
        status, words = error.status, f"answered {error.status}: {error.message}"
        if status == 429:
            seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
            return Busy(f"{self.server.address} {words}", retry_after_s=seconds)
        if status in DENIED:
            return self._failed(f"{words} (its key, its routes or its model's name are not as expected)", "denied")
        if 400 <= status < 500:
            return Refused(error.message, status, error.param)
        return self._failed(words, "status")

    def _malformed(self, error: Exception) -> Failed:
        return self._failed(f"answered what cannot be read: {error}", "malformed")

    def _failed(self, what: str, kind: str) -> Failed:
        return Failed(f"{self.server.address} {what}", kind)
