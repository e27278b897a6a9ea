"""One request to one server, and to the next where that one fails: each server is tried at most once.

Whatever a server does, what comes out is choices, `UpstreamRefused` (the request's fault) or `RolloutServerFailed` (the
server's). The connection of a call that did not end as it should is closed, which is how vLLM learns that nobody
listens. Only a request of whose answer nobody has seen anything is sent again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from yarl import URL

from headrace.data.step import IntArray
from headrace.gateway.upstream.errors import (
    NoRolloutServer,
    RolloutServerBusy,
    RolloutServerFailed,
    ServerFault,
    UpstreamRefused,
    read_fault,
)
from headrace.gateway.upstream.fleet import Fleet, balancer_of
from headrace.gateway.upstream.flush_clock import Finish, FlushClock
from headrace.gateway.upstream.gate import Deadline
from headrace.gateway.upstream.http_client import (
    CONTROL_ANSWER_BYTES,
    AnswerTooLarge,
    ConnectFailed,
    ConnectionDropped,
    HttpError,
    HttpResponse,
    SseDecoder,
    UpstreamClient,
    error_text,
    read_up_to,
    why_unreachable,
)
from headrace.gateway.upstream.options import UpstreamOptions
from headrace.gateway.upstream.server import UpstreamServer
from headrace.gateway.upstream.types import SampledChoice, VersionSpans
from headrace.gateway.upstream.wire import CompletionsWire, EncodedRequest, GenerateWire, SamplingWire, extend_spans
from headrace.net.http_answer import seconds_of

T = TypeVar("T")

#: Statuses that are the server's fault and not the request's: its key, its routes, the model's name.
DENIED_STATUSES = (401, 403, 404, 405)
#: Seconds that the end of a stream may take after [DONE]; its connection is then closed and not kept.
STREAM_TAIL_S = 1.0
#: The data of the event that ends a stream.
DONE = b"[DONE]"


class _StreamedChoice:
    """How far one choice of a stream has come."""

    __slots__ = ("begun", "finished", "spans", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.spans: VersionSpans = ()
        self.begun = self.finished = False


class ServerCall:
    """One request sent to one server; its answer is read whole (`whole`) or piece by piece: the first by `open`, then
    `new_pieces` whenever one that follows (`follow`) is told of news, until it has `ended`; `read_tail` comes last."""

    def __init__(
        self,
        client: UpstreamClient,
        server: UpstreamServer,
        url: URL,
        wire: SamplingWire,
        encoded: EncodedRequest,
        deadline: Deadline,
        most_bytes: int,
    ) -> None:
        self.server = server
        #: Known when it began.
        self.version = server.version
        self._client, self._url, self._wire, self._encoded = client, url, wire, encoded
        self._deadline, self._most_bytes = deadline, most_bytes
        self._response: HttpResponse | None = None
        self._open = True
        #: Whether all pieces of a streamed answer were read.
        self.ended = False
        server.in_flight += 1
        server.calls += 1

    def close(self) -> None:
        """Ends the call wherever it is. An answer that was read to its end keeps its connection for the next."""
        if self._open:
            self._open = False
            self.server.in_flight -= 1
        if self._response is not None:
            self._response.close()
            self._response = None

    # -- whole ---------------------------------------------------------------------------------------------------------

    async def whole(self) -> list[SampledChoice]:
        """Sends the request and reads the whole answer: its choices by index. Raises like `Dispatch.send`."""
        data = await self._deadline.wait(self._exchange(), self.server.address)
        encoded = self._encoded
        try:
            choices = self._wire.whole(encoded, data, self.version)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._malformed(error) from error
        if len(choices) > 1:
            choices.sort(key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(encoded.choices)):
            indices = [choice.index for choice in choices]
            raise self._failed(
                f"answered with the choices {indices} where {encoded.choices} were asked for", "malformed"
            )
        for choice in choices:
            choice.server = self.server.address
            self._check_images_read(choice)
            if choice.finish_reason is None:
                raise self._failed("answered without a finish_reason", "malformed")
            if choice.spans and choice.spans[-1][0] >= len(choice.ids):
                choice.spans = ()  # of tokens that are not there: nothing it says of versions can be trusted
            if choice.spans:
                self.server.saw_version(choice.spans[-1][1])
            elif choice.ids:
                choice.spans = ((0, self.version),)
        self.close()
        return choices

    async def _exchange(self) -> bytes:
        response = await self._sent(stream=False)
        try:
            return await read_up_to(response, self._most_bytes)
        except AnswerTooLarge as error:
            raise self._failed(f"sent {error}", "too_large") from None
        except HttpError as error:
            raise self._failed(f"cut its answer off: {error_text(error)}", "cut") from error

    # -- in pieces -----------------------------------------------------------------------------------------------------

    async def open(self) -> list[SampledChoice]:
        """Sends the request and returns the first pieces of its answer; none where it has `ended` without any."""
        self._events = SseDecoder()
        self._choices = [_StreamedChoice() for _ in range(self._encoded.choices)]
        self._consumed: IntArray | None = None
        self._size = 0
        content = await self._deadline.wait(self._sent(stream=True), self.server.address)
        while not self.ended:
            await self._deadline.wait(content.readable(), self.server.address)
            if pieces := self.new_pieces(joined=False):
                return pieces
        return []

    def new_pieces(self, *, joined: bool) -> list[SampledChoice]:
        """The pieces that have come, without waiting for more; `joined`: those of a choice as one. Empty where none is
        whole yet, or the answer has `ended`."""
        assert self._response is not None
        content = self._response
        try:
            chunk = content.take()
        except HttpError as error:
            raise self._failed(f"cut its answer off: {error_text(error)}", "cut") from error
        if not chunk:
            if content.over:
                if not all(choice.finished for choice in self._choices):
                    raise self._failed("ended its answer before it was finished", "cut")
                self.ended = True
            return []
        self._deadline.renew()
        self._size += len(chunk)
        if self._size > self._most_bytes:
            raise self._failed(f"sent an answer of more than the {self._most_bytes} bytes allowed", "too_large")
        events = self._events.feed(chunk)
        if DONE in events:
            self.ended = True
            events = events[: events.index(DONE)]
        pieces = self._read(events, joined=joined) if events else []
        return pieces + self._unfinished() if self.ended else pieces

    @property
    def over(self) -> bool:
        """Whether nothing more will come than what has."""
        return self._response is None or self._response.over

    def follow(self, clock: FlushClock, news: Callable[[], Finish | None]) -> None:
        """Has `news` called by the clock whenever there may be `new_pieces`."""
        if self._response is not None:
            self._response.follow(clock, news)

    def unfollow(self) -> None:
        """Tells nobody any more."""
        if self._response is not None:
            self._response.unfollow()

    def hold(self, clock: FlushClock, until: float, *, to_the_end: bool) -> None:
        """Tells who follows nothing before a time of the loop. `to_the_end`: the answer's end is near, and is told
        even so."""
        if self._response is not None:
            self._response.hold(clock, until, to_the_end=to_the_end)

    def hurry(self) -> None:
        """Ends that time."""
        if self._response is not None:
            self._response.hurry()

    def _read(self, events: list[bytes], *, joined: bool) -> list[SampledChoice]:
        wire, encoded = self._wire, self._encoded
        try:
            if joined:
                pieces = wire.pieces(encoded, events, self.version)
            else:
                pieces = [piece for data in events for piece in wire.piece(encoded, data, self.version)]
        except ServerFault as error:
            raise self._refusal(error) from None
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._malformed(error) from error
        for piece in pieces:
            self._track(piece)
        return pieces

    def _track(self, piece: SampledChoice) -> None:
        if not 0 <= piece.index < len(self._choices) or self._choices[piece.index].finished:
            raise self._failed(f"sent a piece of choice {piece.index}, which is not open", "malformed")
        choice = self._choices[piece.index]
        if piece.consumed is not None:
            self._consumed = piece.consumed
        if not choice.begun:
            choice.begun = True
            piece.consumed = self._consumed  # one wire tells it with the first choice only
            self._check_images_read(piece)
        if piece.ids:
            choice.spans = extend_spans(choice.spans, choice.tokens, self.server.version)
            choice.tokens += len(piece.ids)
        if piece.spans and piece.spans[-1][0] < choice.tokens:
            choice.spans = piece.spans
            self.server.saw_version(piece.spans[-1][1])
        piece.spans = choice.spans
        piece.server = self.server.address
        choice.finished = piece.finish_reason is not None

    def _check_images_read(self, beginning: SampledChoice) -> None:
        """Fails where a server does not report the ids of a prompt with images: it may not have looked at them."""
        if self._encoded.request.images and beginning.ids and beginning.consumed is None:
            raise self._failed("did not tell the ids that it made of a prompt with images", "malformed")

    def _unfinished(self) -> list[SampledChoice]:
        """vLLM says nothing at all of a choice that was aborted before its first token."""
        pieces = []
        for index, choice in enumerate(self._choices):
            if choice.finished:
                continue
            if choice.tokens:
                raise self._failed(f"ended its answer before choice {index} was finished", "cut")
            choice.finished = True
            pieces.append(SampledChoice(index, [], [], "", "abort", server=self.server.address))
        return pieces

    async def read_tail(self) -> None:
        """Once it has `ended`: reads what is left after `[DONE]`, so that the connection can be used again."""
        assert self._response is not None
        content = self._response
        try:
            async with asyncio.timeout(STREAM_TAIL_S):
                while part := await content.readany():
                    self._size += len(part)
                    if self._size > self._most_bytes:
                        break
        except (TimeoutError, HttpError):
            pass  # the answer is whole; only its connection is lost
        self.close()

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    async def _sent(self, *, stream: bool) -> HttpResponse:
        """Sends the request; returns once the answer's headers are there, with status 200."""
        body = self._wire.body(self._encoded, self.server.sampled_model, stream=stream)
        try:
            response = await self._client.post(self._url, body)
        except (ConnectFailed, ConnectionDropped) as error:
            raise self._failed(why_unreachable(error), "unreachable") from error
        except HttpError as error:
            raise self._failed(f"does not speak HTTP as it should: {error}", "malformed") from error
        self._response = response
        if response.status != 200:
            try:
                data = await read_up_to(response, CONTROL_ANSWER_BYTES)
            except (HttpError, AnswerTooLarge):
                data = b""
            raise self._refusal(read_fault(response.status, data), response.headers.get("retry-after"))
        return response

    def _refusal(self, error: ServerFault, retry_after: str | None = None) -> UpstreamRefused | RolloutServerFailed:
        status, said = error.status, f"answered {error.status}: {error.message}"
        if status == 429:
            return RolloutServerBusy(f"{self.server.address} {said}", retry_after_s=seconds_of(retry_after))
        if status in DENIED_STATUSES:
            return self._failed(f"{said} (its key, its routes or its model's name are not as expected)", "denied")
        if 400 <= status < 500:
            return UpstreamRefused(error.message, status, error.param)
        return self._failed(said, "status")

    def _malformed(self, error: Exception) -> RolloutServerFailed:
        return self._failed(f"answered what cannot be read: {error}", "malformed")

    def _failed(self, what: str, kind: str) -> RolloutServerFailed:
        return RolloutServerFailed(f"{self.server.address} {what}", kind)


#: Kinds of failure after which a server is down until a probe finds it well.
DOWN_KINDS = frozenset({"unreachable", "status", "denied", "hang", "cut"})
#: Kinds of failure that mean no more than that the server was not available.
UNAVAILABLE_KINDS = frozenset({"unreachable", "status", "busy", "hang"})


class Dispatch:
    """Sends requests to servers that are up, by the fleet's balancing; reports failures to the fleet."""

    def __init__(self, fleet: Fleet, options: UpstreamOptions, counters: Counter[str]) -> None:
        self.client: UpstreamClient | None = None
        self._fleet, self._options, self._counters = fleet, options, counters
        self._balance = balancer_of(options.balance)
        self._completions, self._generate = CompletionsWire(), GenerateWire()
        self._most_bytes = int(options.max_answer_mb * 2**20)

    async def send(
        self, encoded: EncodedRequest, deadline: Deadline, exchange: Callable[[ServerCall], Awaitable[T]]
    ) -> tuple[ServerCall, T]:
        """Tries one server after the other; returns the call that worked and what `exchange` made of it.

        Raises `UpstreamRefused` at the first refusal, `RolloutServerFailed` where the request took too long in all, and
        `NoRolloutServer` or the last server's failure once none is left."""
        tried: list[UpstreamServer] = []
        errors: list[RolloutServerFailed] = []
        while True:
            candidates = [server for server in self._fleet.up if server not in tried] if tried else self._fleet.up
            if encoded.request.images:
                candidates = self._with_images(encoded, candidates)
            if not candidates:
                raise self.none_left(errors)
            server = self._balance.pick(candidates, encoded.request.sticky)
            call = self._call(server, encoded, deadline)
            if tried:
                self._counters["retries"] += 1
            tried.append(server)
            try:
                return call, await exchange(call)
            except RolloutServerFailed as error:
                call.close()
                self.failed(server, error)
                errors.append(error)
                if error.kind == "late":
                    raise
            except UpstreamRefused:
                call.close()
                self._counters["refused"] += 1
                raise
            except BaseException:
                call.close()
                raise

    def _call(self, server: UpstreamServer, encoded: EncodedRequest, deadline: Deadline) -> ServerCall:
        assert self.client is not None, "start() comes before the first request"
        self._counters["calls"] += 1
        if server.generate and self._generate.can_serve(encoded.request):
            url, wire = server.generate_url, self._generate
            return ServerCall(self.client, server, url, wire, encoded, deadline, self._most_bytes)
        return ServerCall(
            self.client, server, server.completions_url, self._completions, encoded, deadline, self._most_bytes
        )

    def _with_images(self, encoded: EncodedRequest, servers: Sequence[UpstreamServer]) -> list[UpstreamServer]:
        """The servers that take a prompt with images; `UpstreamRefused` where none does."""
        missing = self._generate.missing(encoded.request)
        if missing:
            raise UpstreamRefused(
                f"a prompt with images is sampled without {', '.join(missing)}: leave it out", 400, missing[0]
            )
        able = [server for server in servers if server.generate]
        if servers and not able:
            raise UpstreamRefused(
                f"{servers[0].address} takes no images: it has no /inference/v1/generate (vLLM 0.32 has it with "
                "--enable-scale-out)"
            )
        return able

    def failed(self, server: UpstreamServer, error: RolloutServerFailed) -> None:
        """Counts a server's failure; takes the server out where the error is of a kind that lasts."""
        server.failures += 1
        self._counters[f"failed_{error.kind}"] += 1
        if error.kind in DOWN_KINDS:
            self._fleet.down(server, str(error))

    def none_left(self, errors: list[RolloutServerFailed]) -> NoRolloutServer | RolloutServerFailed:
        """The error of a request that no server is left for: the last bad answer's, else `NoRolloutServer`."""
        nonsense = [error for error in errors if error.kind not in UNAVAILABLE_KINDS]
        if nonsense:
            return nonsense[-1]
        self._counters["no_server"] += 1
        waits = [
            error.retry_after_s
            for error in errors
            if isinstance(error, RolloutServerBusy) and error.retry_after_s is not None
        ]
        reasons = [str(error) for error in errors] or [
            f"{server.address} is {server.state}: {server.reason}" for server in self._fleet.servers.values()
        ]
        said = "; ".join(reasons) or "none is configured"
        return NoRolloutServer(
            f"no rollout server can take this call: {said}", min(waits, default=self._options.probe_s)
        )
