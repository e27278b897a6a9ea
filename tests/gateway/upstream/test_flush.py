"""Streams that are read by the flush: what is read when, and that nothing is lost, changed or out of order."""

from __future__ import annotations

import asyncio
import json
import math
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.upstream.kit import Puppet, Request, connected, stream_of, streamed, streams, until, upstream_request
from tests.gateway.wire import Writer, end_stream, event, hangs, send

from headrace.gateway.upstream import RolloutServerFailed, http_client
from headrace.gateway.upstream.flush_clock import FLUSH_TICK_S, FlushClock, flush_time
from headrace.gateway.upstream.http_client import ConnectionDropped, HttpResponse, SseDecoder
from headrace.gateway.upstream.types import SampledChoice
from headrace.gateway.upstream.wire import CompletionsWire, EncodedRequest, join_pieces
from headrace.tokens.vocabulary import Vocabulary

Make = Callable[..., Coroutine[Any, Any, Puppet]]

# -- what is read when, by a clock that only moves when everything waits -----------------------------------------------


class _NoWait(selectors.DefaultSelector):
    """Has the loop's clock jump to where it would have waited."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing will ever happen"
        self.loop.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        selector = _NoWait()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


class Socket:
    """A connection's side that a response tells whether to read."""

    def __init__(self) -> None:
        self.flows: list[bool] = []
        self.aborted = False

    def flow(self, *, reading: bool) -> None:
        if not self.flows or self.flows[-1] != reading:
            self.flows.append(reading)

    def abort(self) -> None:
        self.aborted = True


def at(seconds: float, what: Callable[..., Any], *args: Any) -> None:
    asyncio.get_running_loop().call_later(seconds, what, *args)


class Follower:
    """Takes whatever it is told of, and holds what follows until the next of its times."""

    def __init__(self, response: HttpResponse, *holds: float, to_the_end: bool = False) -> None:
        self.taken: list[tuple[bytes | str, float]] = []
        self._response, self._holds, self._to_the_end = response, list(holds), to_the_end
        self._clock = FlushClock()
        self._hold()
        response.follow(self._clock, self._news)

    def _news(self) -> None:
        try:
            self.taken.append((self._response.take(), now()))
        except ConnectionDropped as error:
            self.taken.append((str(error), now()))
        self._hold()

    def _hold(self) -> None:
        if self._holds:
            self._response.hold(self._clock, self._holds.pop(0), to_the_end=self._to_the_end)


def played(test: Callable[[HttpResponse, Socket], Coroutine[Any, Any, None]]) -> None:
    async def play() -> None:
        socket = Socket()
        await test(HttpResponse(socket), socket)  # type: ignore[arg-type]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(play())


def now() -> float:
    return round(asyncio.get_running_loop().time(), 6)


def test_what_came_while_it_was_held_is_told_together() -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        for seconds, data in ((0.01, b"a"), (0.03, b"b"), (0.06, b"c")):
            at(seconds, response.body, data)
        follower = Follower(response, 0.05, 0.1)
        await asyncio.sleep(1)
        assert follower.taken == [(b"ab", 0.05), (b"c", 0.1)]

    played(test)


def test_what_is_not_held_is_told_as_it_comes() -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        for seconds, data in ((0.01, b"a"), (0.03, b"b"), (0.04, b"c")):
            at(seconds, response.body, data)
        follower = Follower(response, 0.0, 0.02)
        await asyncio.sleep(1)
        # The second time was over, and nothing had come.
        assert follower.taken == [(b"a", 0.01), (b"b", 0.03), (b"c", 0.04)]

    played(test)


def test_what_one_read_brought_is_told_once() -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        def read() -> None:
            response.body(b"a")
            response.body(b"b")
            response.end()

        at(0.01, read)
        follower = Follower(response)
        await asyncio.sleep(1)
        assert follower.taken == [(b"ab", 0.01)]

    played(test)


def test_a_server_that_stalls_holds_back_nothing_that_came_before() -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        at(0.01, response.body, b"a")
        at(60, response.body, b"b")
        follower = Follower(response, 0.05, 0.1)
        await asyncio.sleep(100)
        assert follower.taken == [(b"a", 0.05), (b"b", 60.0)]  # and what follows is told at once

    played(test)


@pytest.mark.parametrize("last", ["end", "hurry"])
def test_the_end_of_an_answer_and_a_pause_are_told_though_it_is_held(last: str) -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        at(0.01, response.body, b"a")
        at(0.02, getattr(response, last))
        follower = Follower(response, 0.05)
        await asyncio.sleep(1)
        assert follower.taken == [(b"a", 0.02)]

    played(test)


def test_a_hold_that_was_ended_early_does_not_end_the_next() -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        at(0.01, response.body, b"a")
        at(0.02, response.hurry)
        at(0.03, response.body, b"b")
        follower = Follower(response, 0.05, 0.09)
        await asyncio.sleep(1)
        assert follower.taken == [(b"a", 0.02), (b"b", 0.09)]

    played(test)


def test_what_came_before_a_failure_is_taken_before_it_is_told() -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        at(0.01, response.body, b"a")
        at(0.02, response.fail, ConnectionDropped("gone"))
        follower = Follower(response, 0.05)
        await asyncio.sleep(1)
        assert follower.taken == [(b"a", 0.02)]
        with pytest.raises(ConnectionDropped):
            response.take()

    played(test)


@pytest.mark.parametrize(("share", "to_the_end", "flows"), [(0.5, False, []), (2, True, []), (2, False, [False, True])])
def test_only_a_long_hold_leaves_the_socket_unread_and_none_before_the_end(
    share: float, to_the_end: bool, flows: list[bool]
) -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        until = share * http_client.PAUSED_HOLD_S
        follower = Follower(response, until, to_the_end=to_the_end)
        await asyncio.sleep(until / 2)
        assert socket.flows == flows[:1]
        await asyncio.sleep(until)
        assert socket.flows == (flows or [True])
        assert follower.taken == []

    played(test)


def test_who_leaves_while_it_is_held_leaves_a_socket_that_is_read() -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        until = 2 * http_client.PAUSED_HOLD_S
        follower = Follower(response, until)
        response.unfollow()
        assert socket.flows == [False, True]
        at(until / 4, response.body, b"a")
        await asyncio.sleep(2 * until)
        assert follower.taken == []
        assert socket.flows == [False, True]  # its time's end, too, changes nothing more

    played(test)


def test_who_leaves_has_no_more_read_than_may_wait() -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        Follower(response, 0.05)
        assert not response.body(b"a" * http_client.HIGH_WATER_BYTES)
        socket.flow(reading=False)  # as the connection does then
        response.unfollow()
        assert socket.flows == [False]
        response.take()
        assert socket.flows == [False, True]

    played(test)


def test_a_response_that_is_closed_tells_nobody() -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        follower = Follower(response, 0.05)
        at(0.01, response.body, b"a")
        at(0.02, response.close)
        await asyncio.sleep(1)
        assert socket.aborted
        assert (socket.flows, follower.taken) == ([], [])

    played(test)


def test_what_is_due_at_the_same_time_is_called_and_then_finished() -> None:
    async def test(response: HttpResponse, socket: Socket) -> None:
        clock, rung = FlushClock(), list[str]()

        def ring(name: str, due: float) -> Callable[[], None]:
            assert now() == due
            rung.append(f"{name} at {due}")
            return lambda: rung.append(f"{name} is finished")

        for name, when in (("a", 0.05), ("b", 0.1), ("c", 0.05)):
            clock.call_at(when, partial(ring, name))
        for name in "xy":
            clock.call_soon(partial(ring, name, 0.0))
        await asyncio.sleep(1)
        assert rung == [
            *("x at 0.0", "y at 0.0", "x is finished", "y is finished"),
            *("a at 0.05", "c at 0.05", "a is finished", "c is finished"),
            *("b at 0.1", "b is finished"),
        ]

    played(test)


# -- nothing is lost ---------------------------------------------------------------------------------------------------


def chunk(index: int, ids: list[int], finish: str | None, *, logs: bool, prompt: list[int] | None) -> bytes:
    choice = {"index": index, "text": "".join(map(chr, ids)), "finish_reason": finish, "token_ids": ids}
    choice["logprobs"] = {"token_logprobs": [-0.5 * token for token in ids]} if logs else None
    choice["prompt_token_ids"] = prompt
    return event({"choices": [choice]})


tokens = st.lists(st.lists(st.integers(32, 0x1FFF), max_size=3), min_size=1, max_size=12)


@given(st.lists(tokens, min_size=1, max_size=3), st.data(), st.booleans(), st.lists(st.integers(0, 10**6), max_size=12))
def test_any_split_of_the_bytes_gives_each_choice_what_was_sampled(
    choices: list[list[list[int]]], data: st.DataObject, logs: bool, cuts: list[int]
) -> None:
    asked = EncodedRequest.of(upstream_request(n=len(choices)))
    prompt: list[int] = asked.request.prompt.tolist()
    order = data.draw(st.permutations([index for index, parts in enumerate(choices) for _ in parts]))
    left = [list(parts) for parts in choices]
    sent = b""
    for index in order:
        ids = left[index].pop(0)
        first = len(left[index]) + 1 == len(choices[index])
        sent += chunk(index, ids, None if left[index] else "stop", logs=logs, prompt=prompt if first else None)
    places = sorted({place % (len(sent) + 1) for place in cuts})
    decoder, wire = SseDecoder(), CompletionsWire()
    found: list[SampledChoice] = []
    for begin, end in zip([0, *places], [*places, len(sent)], strict=True):
        events = decoder.feed(sent[begin:end])
        joined = wire.pieces(asked, events, 0)
        alone = join_pieces([piece for each in events for piece in wire.piece(asked, each, 0)])
        assert list(map(told, joined)) == list(map(told, alone))
        assert len({piece.index for piece in joined}) == len(joined)
        found += joined
    for index, parts in enumerate(choices):
        own = [piece for piece in found if piece.index == index]
        ids = [token for part in parts for token in part]
        assert [token for piece in own for token in piece.ids] == ids
        assert "".join(piece.text or "" for piece in own) == "".join(map(chr, ids))
        if logs:
            assert [value for piece in own for value in piece.log_probs or ()] == [-0.5 * token for token in ids]
        else:
            assert all(piece.log_probs is None for piece in own)
        assert [piece.finish_reason for piece in own][-1] == "stop"
        assert [piece.consumed is not None for piece in own] == [True] + [False] * (len(own) - 1)


def told(piece: SampledChoice) -> Any:
    return (piece.index, piece.ids, piece.log_probs, piece.text, piece.finish_reason, piece.consumed is not None)


def test_an_event_that_cannot_be_read_is_told_as_it_is_alone() -> None:
    asked, wire = EncodedRequest.of(upstream_request()), CompletionsWire()
    good = json.dumps({"choices": [{"index": 0, "text": "x", "token_ids": [1]}]}).encode()
    for bad in (b'{"choices": 3}', b"{", good + b"," + good):
        with pytest.raises(ValueError) as together:
            wire.pieces(asked, [good, bad], 0)
        with pytest.raises(ValueError) as alone:
            wire.piece(asked, bad, 0)
        assert str(together.value) == str(alone.value)


# -- streams of a server -----------------------------------------------------------------------------------------------

LONG_S = 1000.0


@pytest.fixture
def reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an answer ends even the longest window."""
    monkeypatch.setattr(http_client, "PAUSED_HOLD_S", math.inf)


def then(first: int) -> Callable[[Request, Writer], Coroutine[Any, Any, None]]:
    """The rest of an answer, and its end."""

    async def behave(request: Request, writer: Writer) -> None:
        for part in stream_of(request.json)[first:]:
            await send(writer, part)
        await end_stream(writer)
        await asyncio.Event().wait()

    return behave


@pytest.mark.usefixtures("reads_all")
async def test_the_first_token_comes_at_once_and_the_rest_together(puppet: Make, vocabulary: Vocabulary) -> None:
    server, seen = await puppet(), asyncio.Event()
    async with connected(vocabulary, server) as upstream:
        server.behave = streams(1, then(1), seen)
        stream = streamed(upstream, upstream_request(), LONG_S)
        first = await anext(stream)  # nothing else was sent yet
        seen.set()
        rest = [piece async for piece in stream]
    assert first.ids == [10]
    assert [piece.ids for piece in rest] == [list(range(11, 18))]
    assert (rest[0].log_probs, rest[0].text, rest[0].finish_reason) == ([-0.5] * 7, "x" * 7, "length")


async def test_after_the_last_token_nothing_waits_for_the_end(puppet: Make, vocabulary: Vocabulary) -> None:
    """Even where the socket would be left alone: the test would take as long as the window."""
    server, seen = await puppet(), asyncio.Event()
    async with connected(vocabulary, server) as upstream:
        server.behave = streams(1, then(1), seen)
        stream = streamed(upstream, upstream_request(max_tokens=1), LONG_S)
        assert (await anext(stream)).finish_reason == "length"
        seen.set()
        assert [piece async for piece in stream] == []


async def test_at_0_every_token_comes_by_itself(puppet: Make, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, await puppet()) as upstream:
        found = [piece.ids async for piece in streamed(upstream, upstream_request(), 0.0)]
    assert found == [[token] for token in range(10, 18)]


def gathered(upstream: Any) -> int:
    """Bytes that the only stream was sent and nobody has read."""
    (call,) = upstream._streams
    size: int = call._response._size if call._response is not None else 0
    return size


@pytest.mark.usefixtures("reads_all")
async def test_tokens_that_wait_to_be_read_keep_the_version_that_sampled_them(
    puppet: Make, vocabulary: Vocabulary
) -> None:
    server, first, more, rest = await puppet(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def behave(request: Request, writer: Writer) -> None:
        for part in stream_of(request.json)[1:3]:
            await send(writer, part)
        more.set()
        await rest.wait()
        await then(3)(request, writer)

    async with connected(vocabulary, server, version=4) as upstream:
        server.behave = streams(1, behave, first)
        stream = streamed(upstream, upstream_request(), LONG_S)
        assert (await anext(stream)).ids == [10]
        second = asyncio.ensure_future(anext(stream))
        first.set()
        size = sum(map(len, stream_of({"prompt": [5, 6, 7], "max_tokens": 8})[1:3]))
        await until(lambda: gathered(upstream) == size)
        await upstream.catch_up()
        upstream.set_version(5)
        piece = await second
        rest.set()
        last = [piece async for piece in stream][-1]
    assert (piece.ids, piece.spans) == ([11, 12], ((0, 4),))
    assert last.spans == ((0, 4), (3, 5))


@pytest.mark.usefixtures("reads_all")
async def test_a_pause_is_told_of_what_is_held(puppet: Make, vocabulary: Vocabulary) -> None:
    server, first = await puppet(), asyncio.Event()

    async def behave(request: Request, writer: Writer) -> None:
        await send(writer, stream_of(request.json)[1])
        await asyncio.Event().wait()

    async with connected(vocabulary, server) as upstream:
        server.behave = streams(1, behave, first)
        stream = streamed(upstream, upstream_request(), LONG_S)
        await anext(stream)
        second = asyncio.ensure_future(anext(stream))
        first.set()
        await until(lambda: gathered(upstream) > 0)
        await upstream.pause("keep")
        assert (await second).ids == [11]
        await stream.aclose()
        await upstream.resume()


@given(began=st.floats(0, 1e6), flush_s=st.floats(0.001, 1.0))
def test_streams_are_read_together_and_never_later_than_their_flush(began: float, flush_s: float) -> None:
    at = flush_time(began, flush_s)
    assert began < at <= began + flush_s
    assert at == began + flush_s or (at + 1e-6) % FLUSH_TICK_S < 2e-6


async def test_closing_a_stream_while_it_is_held_hangs_up(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    async with connected(vocabulary, server) as upstream:
        server.behave = streams(1, hangs)
        stream = streamed(upstream, upstream_request(), LONG_S)
        await anext(stream)
        await stream.aclose()  # it waits, with its socket left alone
        await server.hung_up.wait()
        assert upstream.counters["aborted"] == 1


async def test_a_server_that_falls_silent_while_it_is_held_fails(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    async with connected(vocabulary, server, idle_s=2, probe_s=60) as upstream:
        server.behave = streams(2, hangs)
        with pytest.raises(RolloutServerFailed) as caught:
            async for _ in streamed(upstream, upstream_request(), LONG_S):
                pass
        assert caught.value.kind == "hang"


@pytest.mark.usefixtures("reads_all")
@pytest.mark.parametrize("flush_s", [0.0, 0.001, LONG_S])
async def test_a_taker_that_cannot_take_more_is_waited_for(
    puppet: Make, vocabulary: Vocabulary, flush_s: float
) -> None:
    server, seen = await puppet(), asyncio.Event()
    told: list[int] = []
    under_way = most = 0

    async def slowly() -> None:
        nonlocal under_way
        for _ in range(3):
            await asyncio.sleep(0)
        under_way -= 1

    def take(piece: SampledChoice) -> Callable[[], Awaitable[None]]:
        def send() -> Awaitable[None]:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            told.extend(piece.ids)
            seen.set()
            return slowly()

        return send

    async with connected(vocabulary, server) as upstream:
        server.behave = streams(1, then(1), seen)
        await upstream.stream(upstream_request(), take, flush_s)
    assert told == list(range(10, 18))
    assert (most, under_way) == (1, 0)


async def test_a_taker_that_takes_no_more_for_longer_than_the_flush_gets_the_rest(
    puppet: Make, vocabulary: Vocabulary
) -> None:
    server, first, stalled = await puppet(), asyncio.Event(), asyncio.Event()
    told: list[int] = []

    async def behave(request: Request, writer: Writer) -> None:
        await send(writer, stream_of(request.json)[1])
        await stalled.wait()
        await then(2)(request, writer)

    async def stall() -> None:
        stalled.set()
        await until(lambda: not upstream._flush_clock._due)  # the time is over for which its socket was left unread

    def take(piece: SampledChoice) -> Callable[[], Awaitable[None] | None]:
        told.extend(piece.ids)
        first.set()
        return stall if piece.ids == [11] else lambda: None

    async with connected(vocabulary, server) as upstream:
        server.behave = streams(1, behave, first)
        await upstream.stream(upstream_request(), take, 2 * http_client.PAUSED_HOLD_S)
    assert told == list(range(10, 18))
    assert stalled.is_set()


@pytest.mark.parametrize("sending", [False, True])
@pytest.mark.parametrize("fails_at", [10, 11, 17])
async def test_what_a_taker_raises_ends_the_stream(
    puppet: Make, vocabulary: Vocabulary, fails_at: int, sending: bool
) -> None:
    """At the first piece, at one that is told in passing, and at the last; when it takes one or hands it on."""
    server = await puppet()

    def fail() -> None:
        raise ZeroDivisionError

    def take(piece: SampledChoice) -> Callable[[], None] | None:
        if fails_at not in piece.ids:
            return None
        return fail if sending else fail()

    async with connected(vocabulary, server) as upstream:
        with pytest.raises(ZeroDivisionError):
            await upstream.stream(upstream_request(), take)
        assert upstream.in_flight == 0
        assert upstream.counters["aborted"] == (fails_at < 17)
