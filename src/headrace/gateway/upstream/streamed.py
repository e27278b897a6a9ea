"""Streamed answers: `StreamedAnswer` is what was told of one, `StreamPump` tells what comes.

A pump runs in the event loop's own callbacks: a task that wakes for every flush, through each layer that waits, costs
more than what is then done. Who streams waits once, for what is not done in passing: the end of a choice, a taker that
cannot take more, a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from headrace.gateway.upstream.dispatch import ServerCall
from headrace.gateway.upstream.flush_clock import Finish, FlushClock, flush_time
from headrace.gateway.upstream.gate import Deadline, Gate
from headrace.gateway.upstream.types import SampledChoice, UpstreamRequest, VersionSpans
from headrace.gateway.upstream.wire import extend_spans

#: Hands a piece on. What it returns is waited for before the next: None where more can follow at once.
HandOn = Callable[[], Awaitable[None] | None]
#: Takes a piece that was sampled; how it is handed on, None where that is done.
Taker = Callable[[SampledChoice], HandOn | None]

#: An answer that has room for less than so many of its last piece may end within the next.
NEAR_END = 2


class StreamedAnswer:
    """What was told of an answer so far, over all the requests that it takes."""

    def __init__(self, request: UpstreamRequest, choices: int, take: Taker) -> None:
        self._take = take
        self._most = request.sampling.get("max_tokens")
        #: Of each choice, what was told; without a finish_reason while there is more to come.
        self.choices = [SampledChoice(index, [], None, None) for index in range(choices)]
        #: Whether the end of a choice may come with its next piece.
        self.near_end = False
        self._server = ""
        self._part = request
        self._before: SampledChoice | None = None

    def continue_with(self, part: UpstreamRequest, before: SampledChoice | None) -> None:
        """From here on pieces are those of the request `part`, for what is left behind `before` of one choice."""
        self._part, self._before = part, before

    def choice_of(self, piece: SampledChoice) -> SampledChoice:
        """The choice that a piece is of."""
        return self.choices[piece.index if self._before is None else self._before.index]

    def end(self, choice: SampledChoice) -> HandOn | None:
        """Ends a choice that has all the tokens that it may have; how that is told."""
        choice.finish_reason = "length"
        return self._take(SampledChoice(choice.index, [], [], "", "length", spans=choice.spans, server=self._server))

    def add(self, piece: SampledChoice) -> HandOn | None:
        """Adds a piece; how it is told."""
        if self._before is not None:
            append_to(piece, self._before, self._part)
        whole = self.choices[piece.index]
        whole.ids += piece.ids
        whole.spans = piece.spans
        self._server = piece.server
        whole.finish_reason = piece.finish_reason
        self.near_end = self._most is not None and self._most - len(whole.ids) <= NEAR_END * len(piece.ids)
        return self._take(piece)


async def hand_on(send: HandOn | None) -> None:
    """Hands a piece on, and waits until more can follow."""
    if send is not None and (waits := send()) is not None:
        await waits


class StreamPump:
    """Tells what one call's answer brings behind its first pieces: as it comes, or what has come within `flush_s`."""

    def __init__(
        self,
        answer: StreamedAnswer,
        call: ServerCall,
        deadline: Deadline,
        gate: Gate,
        clock: FlushClock,
        flush_s: float,
    ) -> None:
        self._answer, self._call, self._deadline, self._gate = answer, call, deadline, gate
        self._clock, self._flush_s = clock, flush_s
        self._now = asyncio.get_running_loop().time
        self._read_at = self._now()
        self._gathers = False
        self._stalled: Awaitable[None] | None = None

    async def run(self, *, gathers: bool) -> list[SampledChoice]:
        """Tells what comes. Returns pieces that are left to the caller, the first of which ends a choice; or once what
        is told can be taken again; or when the call has ended. Without `gathers` only the end is to come, and nothing
        waits for `flush_s`.

        Raises `RolloutServerFailed`, and what the taker raises."""
        self._gathers = gathers and self._flush_s > 0
        woken = self._woken = asyncio.get_running_loop().create_future()
        self._hold()
        self._call.follow(self._clock, self._news)
        try:
            left: list[SampledChoice] = await self._deadline.wait(woken, self._call.server.address)
        finally:
            self._call.unfollow()
            if woken.done() and not woken.cancelled():
                woken.exception()  # seen, though the task may have been cancelled at the same time
        stalled, self._stalled = self._stalled, None
        if stalled is not None:
            await stalled
        return left

    def _news(self) -> Finish | None:
        if self._woken.done():
            return None
        try:
            return self._pass_on()
        except Exception as error:
            self._woken.set_exception(error)
            return None

    def _pass_on(self) -> Finish | None:
        """Adds what has come to the answer, and tells it, but for what is told when it is this pump's turn to write."""
        call, answer, woken = self._call, self._answer, self._woken
        while True:
            self._read_at = self._now()
            pieces = call.new_pieces(joined=self._flush_s > 0)
            is_over = call.ended or call.over
            if len(pieces) == 1 and pieces[0].finish_reason is None and not is_over:
                send = answer.add(pieces[0])
                self._hold()
                return None if send is None else partial(self._write, send)
            for at, piece in enumerate(pieces):
                if piece.finish_reason is not None:
                    woken.set_result(pieces[at:])
                    return None
                send = answer.add(piece)
                self._stalled = send() if send is not None else None
                if self._stalled is not None:
                    woken.set_result(pieces[at + 1 :])
                    return None
            if call.ended:
                woken.set_result([])
                return None
            if not is_over:
                self._hold()
                return None

    def _write(self, send: HandOn) -> None:
        woken = self._woken
        try:
            stalled = send()
        except Exception as error:
            if not woken.done():
                woken.set_exception(error)
            return
        if stalled is not None and not woken.done():
            self._stalled = stalled
            woken.set_result([])

    def _hold(self) -> None:
        """Nothing waits during a pause: versions change after it."""
        if self._gathers and not self._gate.closed:
            until = flush_time(self._read_at, self._flush_s)
            self._call.hold(self._clock, until, to_the_end=self._answer.near_end)


def append_to(piece: SampledChoice, before: SampledChoice, rest: UpstreamRequest) -> None:
    """Changes a piece of the request `rest` into one of the whole answer, of which `before` was already given out."""
    piece.index = before.index
    piece.spans = join_spans(before.spans, len(before.ids), piece.spans)
    if not before.ids:
        return
    piece.continued = True
    if piece.consumed is rest.prompt:
        piece.consumed = None  # the answer's own prompt was told with its beginning
    piece.text = None  # a character may lie across the cut: the two texts do not add up to that of all ids


def join_spans(before: VersionSpans, tokens: int, after: VersionSpans) -> VersionSpans:
    """The spans of an answer that was cut after `tokens` tokens and continued."""
    for first, version in after:
        before = extend_spans(before, tokens + first, version)
    return before
