"""Pauses around a weight sync: orders are held, frozen or cut and continued, and callers see one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.engine.kit import Client, Reference, gap, hold_until_resumed
from tests.gateway.upstream.kit import (
    Puppet,
    Request,
    connected,
    pieces,
    stream_of,
    streamed,
    streams,
    until,
    upstream_request,
)
from tests.gateway.wire import Writer, event, hangs, respond, send
from tests.matrix import paired

from headrace.data import InvalidInput
from headrace.gateway.upstream import (
    CannotPause,
    NoRolloutServer,
    RolloutServerFailed,
    SampledChoice,
    Upstream,
    UpstreamRequest,
)
from headrace.gateway.upstream.gate import Gate
from headrace.tokens.vocabulary import Vocabulary

Make = Callable[..., Any]
WIRES = ["completions", "generate"]
LONG = {"max_tokens": 400, "ignore_eos": True}


def begun(engine: Client, choices: int = 1) -> bool:
    """Whether the engine has sampled something of so many choices."""
    return sum(bool(sequence.output) for call in list(engine.engine.open) for sequence in call.sequences) == choices


def sync(engine: Client, upstream: Upstream, version: int) -> None:
    """What a trainer does while the servers are paused."""
    engine.post("/update_weight_version", {"new_version": str(version)})
    upstream.set_version(version)


async def in_thread(function: Any, *args: Any, **options: Any) -> Any:
    return await asyncio.to_thread(function, *args, **options)


def let_pass(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the event loop goes on by so much, at once."""
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + seconds)


def check_whole(choice: SampledChoice, reference: Reference, asked: UpstreamRequest) -> None:
    """One answer, as if nothing had happened: its log-probs are those of its own tokens one after another."""
    assert choice.finish_reason == "length"
    assert len(choice.ids) == LONG["max_tokens"]
    assert gap(choice.log_probs or [], reference.logprobs(asked.prompt.tolist(), choice.ids)) < 1e-3


@pytest.fixture(scope="module")
def reference(folder: Any) -> Reference:
    return Reference(folder)


async def test_only_orders_are_counted_among_those_that_wait() -> None:
    gate = Gate()
    gate.close()
    waiting = [asyncio.create_task(gate.opened()), asyncio.create_task(gate.wait_open())]
    await asyncio.sleep(0)
    assert gate.waiting == 1
    gate.open()
    await asyncio.gather(*waiting)
    assert gate.waiting == 0


async def test_new_orders_wait_for_the_end_of_a_pause(
    puppet: Make, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await puppet()
    async with connected(vocabulary, server) as upstream:
        await upstream.pause("drain", 3600)
        held = [
            asyncio.create_task(upstream.sample(upstream_request())),
            asyncio.create_task(pieces(upstream, upstream_request())),
        ]
        await until(lambda: upstream.waiting == 2)
        let_pass(600, monkeypatch)  # longer than any request may take
        await asyncio.wait(held, timeout=0.05)
        assert (upstream.paused, server.orders) == (True, [])
        await upstream.resume()
        answer, streamed = await asyncio.gather(*held)
        assert answer.choices[0].ids == [token for piece in streamed for token in piece.ids]
        assert (upstream.paused, upstream.waiting) == (False, 0)


async def test_a_pause_that_nobody_ends_ends_by_itself_and_that_is_said(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    async with connected(vocabulary, server) as upstream:
        await upstream.pause("keep", 0.05)
        await upstream.sample(upstream_request())  # which waits for the end
        assert not upstream.paused
        assert [request.path for request in server.seen].count("/resume") == 1
        assert upstream.overdue is not None
        assert "nobody resumed within the 0.05 s" in upstream.overdue
        await upstream.pause("keep")
        assert upstream.overdue is None
        await upstream.resume()


async def test_a_server_with_weights_that_nobody_verified_stays_out_when_a_pause_ends_by_itself(
    own: Client, vocabulary: Vocabulary
) -> None:
    async with connected(vocabulary, own.host, probe_s=0.05) as upstream:
        await in_thread(hold_until_resumed, own)
        frozen = asyncio.create_task(upstream.sample(upstream_request(**LONG)))
        await until(lambda: begun(own))
        await upstream.pause("keep", 3600)
        await in_thread(own.post, "/update_weight_version", {"new_version": "unverified"})
        await upstream.pause("keep", 0.05)
        with pytest.raises(RolloutServerFailed):
            await frozen
        await until(lambda: not upstream.paused)
        with pytest.raises(NoRolloutServer, match="loaded and not verified"):
            await upstream.sample(upstream_request())
        await in_thread(own.post, "/resume")  # by hand: it is not used even so
        with pytest.raises(NoRolloutServer, match="loaded and not verified"):
            await upstream.sample(upstream_request())
        await in_thread(own.post, "/update_weight_version", {"new_version": "7"})
        await until(lambda: upstream.ready)
        (choice,) = (await upstream.sample(upstream_request())).choices
        assert choice.spans == ((0, 7),)


async def test_a_pause_that_is_asked_for_again_lasts_anew_and_a_resume_ends_its_lease(
    puppet: Make, vocabulary: Vocabulary
) -> None:
    server = await puppet()
    async with connected(vocabulary, server) as upstream:
        await upstream.pause("keep", 3600)
        await upstream.pause("keep", 0.05)
        await until(lambda: not upstream.paused)
        await upstream.pause("keep", 0.05)
        await upstream.resume()
        await upstream.pause("keep", 3600)
        await asyncio.sleep(0.1)  # a lease that had not ended would end this pause
        assert upstream.paused
        await upstream.resume()


async def test_drain_returns_when_everything_in_flight_has_ended(own: Client, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, own.host) as upstream:
        running = asyncio.create_task(upstream.sample(upstream_request(**LONG)))
        await until(lambda: begun(own))
        await upstream.pause("drain")
        assert running.done()
        assert len(running.result().choices[0].ids) == 400
        await upstream.resume()


async def test_a_drain_that_is_called_off_returns(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    async with connected(vocabulary, server) as upstream:
        server.behave = hangs
        running = asyncio.create_task(upstream.sample(upstream_request()))
        await until(lambda: len(server.orders) == 1)
        draining = asyncio.create_task(upstream.pause("drain"))
        await until(lambda: upstream.paused)
        await upstream.resume()
        await draining
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])


async def test_an_order_that_must_go_elsewhere_does_so_during_a_drain(puppet: Make, vocabulary: Vocabulary) -> None:
    bad, good = await puppet(), await puppet()
    async with connected(vocabulary, bad, good, probe_s=60) as upstream:
        bad.behave = hangs
        running = asyncio.create_task(upstream.sample(upstream_request()))
        await until(lambda: len(bad.orders) == 1)
        draining = asyncio.create_task(upstream.pause("drain"))
        await until(lambda: upstream.paused)
        await bad.stop()
        await draining
        assert running.result().server == good.address
        await upstream.resume()


@pytest.mark.parametrize(("wire", "streamed"), paired(WIRES, [False, True]))
async def test_keep_freezes_what_is_in_flight_and_it_goes_on(
    own: Client, vocabulary: Vocabulary, reference: Reference, wire: str, streamed: bool
) -> None:
    asked = upstream_request(**LONG)
    async with connected(vocabulary, own.host, wire=wire) as upstream:
        await in_thread(hold_until_resumed, own)
        running = asyncio.create_task(pieces(upstream, asked) if streamed else upstream.sample(asked))
        await until(lambda: begun(own))
        await upstream.pause("keep")
        assert (await in_thread(own.get, "/is_paused"))["is_paused"]
        await in_thread(sync, own, upstream, 3)
        await upstream.resume()
        found = await running
        choice = joined(found) if streamed else found.choices[0]
        check_whole(choice, reference, asked)
        if wire == "generate":  # the server itself knows which token was sampled with what
            assert [version for _, version in choice.spans] == [0, 3]
        elif not streamed:
            assert (choice.spans, found.version) == (((0, 0),), 0)


async def test_time_in_a_frozen_server_does_not_count(
    puppet: Make, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await puppet()
    released = asyncio.Event()

    async def waits(request: Request, writer: Writer) -> None:
        await released.wait()
        await respond(writer, *server._answer(request))

    async with connected(vocabulary, server) as upstream:
        server.behave = waits
        running = asyncio.create_task(upstream.sample(upstream_request()))
        await until(lambda: len(server.orders) == 1)
        await upstream.pause("keep", 3600)
        let_pass(600, monkeypatch)  # longer than any request may take
        await asyncio.wait([running], timeout=0.05)
        assert not running.done()
        await upstream.resume()
        released.set()
        assert (await running).choices[0].finish_reason == "length"


@pytest.mark.parametrize("wire", [pytest.param("completions", marks=pytest.mark.long), "generate"])
async def test_an_aborted_answer_is_continued_as_one(
    own: Client, vocabulary: Vocabulary, reference: Reference, wire: str
) -> None:
    asked = upstream_request(n=2, seed=1, call_id="cut", **LONG)
    async with connected(vocabulary, own.host, wire=wire) as upstream:
        await in_thread(hold_until_resumed, own, times=2)
        running = asyncio.create_task(upstream.sample(asked))
        for version in (1, 2):
            await until(lambda: begun(own, 2) or running.done())
            await upstream.pause("abort-resume")
            await until(lambda: upstream.waiting > 0 and not own.engine.open)
            await in_thread(sync, own, upstream, version)
            await upstream.resume()
        answer = await running
        assert upstream.counters["continued"] == 4
        assert upstream.counters["aborted"] == 0
    assert answer.version == 0
    for choice in answer.choices:
        check_whole(choice, reference, asked)
        assert choice.consumed is asked.prompt
        assert [version for _, version in choice.spans] == [0, 1, 2]
        assert choice.text is None, "a character may lie across the cut"
    assert answer.choices[0].ids != answer.choices[1].ids


@pytest.mark.parametrize("wire", ["completions", pytest.param("generate", marks=pytest.mark.long)])
async def test_an_aborted_stream_goes_on_as_one(
    own: Client, vocabulary: Vocabulary, reference: Reference, wire: str
) -> None:
    asked = upstream_request(n=2, seed=1, **LONG)
    async with connected(vocabulary, own.host, wire=wire) as upstream:
        await in_thread(hold_until_resumed, own)
        running = asyncio.create_task(pieces(upstream, asked))
        await until(lambda: begun(own, 2) or running.done())
        await upstream.pause("abort-resume")
        await until(lambda: not own.engine.open and upstream.waiting > 0)
        await in_thread(sync, own, upstream, 1)
        await upstream.resume()
        found = await running
    for index in (0, 1):
        choice = joined([piece for piece in found if piece.index == index])
        check_whole(choice, reference, asked)
        assert choice.consumed is asked.prompt
        assert [version for _, version in choice.spans] == [0, 1]


@pytest.mark.parametrize("streamed", [pytest.param(False, marks=pytest.mark.long), True])
async def test_an_abort_that_comes_before_the_pause_that_asked_for_it_is_continued(
    own: Client, vocabulary: Vocabulary, reference: Reference, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """Two gateways before one server: the first one's pause cuts what the other has under way."""
    asked = upstream_request(**LONG)
    async with connected(vocabulary, own.host) as first, connected(vocabulary, own.host, abort_grace_s=240) as second:
        await in_thread(hold_until_resumed, own)
        cut = watched(second, monkeypatch)
        running = asyncio.create_task(pieces(second, asked) if streamed else second.sample(asked))
        await until(lambda: begun(own))
        await first.pause("abort-resume")
        await until(lambda: cut.is_set() or running.done())
        await second.pause("abort-resume")
        await in_thread(sync, own, second, 1)
        await first.resume()
        await second.resume()
        found = await running
        assert second.counters["continued"] == 1
    choice = joined(found) if streamed else found.choices[0]
    check_whole(choice, reference, asked)
    assert [version for _, version in choice.spans] == [0, 1]


def watched(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once an answer of this upstream was aborted and looks for the pause that asked for it."""
    looked, wait_abort = asyncio.Event(), upstream._gate.wait_abort

    async def wait(since: int, within_s: float) -> bool:
        looked.set()
        return await wait_abort(since, within_s)

    monkeypatch.setattr(upstream._gate, "wait_abort", wait)
    return looked


async def test_a_version_set_during_a_stream_is_that_of_the_tokens_after_it(
    puppet: Make, vocabulary: Vocabulary
) -> None:
    server, seen = await puppet(), asyncio.Event()

    async def rest(request: Request, writer: Writer) -> None:
        await streams_from(3, request, writer)

    async with connected(vocabulary, server, version=4) as upstream:
        server.behave = streams(3, rest, seen)
        stream = streamed(upstream, upstream_request())
        found = [await anext(stream) for _ in range(3)]
        upstream.set_version(5)
        seen.set()
        found += [piece async for piece in stream]
    assert [piece.spans for piece in found[:3]] == [((0, 4),)] * 3
    assert found[-1].spans == ((0, 4), (3, 5))


class Aborting(Puppet):
    """Cuts what it streams when it is paused, as vLLM does: with what there is, or with no word at all."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.paused = tokens, asyncio.Event()
        self.behave = self._until_paused

    async def _until_paused(self, request: Request, writer: Writer) -> None:
        if len(self.orders) > 1:
            await respond(writer, *super()._answer(request))
            return

        async def end(request: Request, writer: Writer) -> None:
            if self.tokens:
                last = {"index": 0, "text": "", "token_ids": [], "finish_reason": "abort"}
                await send(writer, event({"choices": [last]}))
            await send(writer, b"data: [DONE]\n\n")
            await asyncio.Event().wait()

        request.json = {**request.json, "max_tokens": self.tokens + 1}  # so that none of them is the last
        await streams(self.tokens, end, self.paused)(request, writer)

    def _answer(self, request: Request) -> tuple[int, Any]:
        if request.path.startswith("/pause"):
            self.paused.set()
        return super()._answer(request)


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_stream_aborted_after_so_many_tokens_asks_for_the_rest(vocabulary: Vocabulary, tokens: int) -> None:
    server = Aborting(tokens)
    await server.start()
    async with connected(vocabulary, server) as upstream:
        found = await aborted(upstream, server, upstream_request(seed=1, call_id="c"))
    rest = server.orders[1]
    assert rest["prompt"] == [5, 6, 7, *range(10, 10 + tokens)]
    assert (rest["max_tokens"], rest["n"], rest["seed"]) == (8 - tokens, 1, 1 + tokens)
    assert sum(len(piece.ids) for piece in found) == 8
    assert [piece.finish_reason for piece in found] == [None] * 7 + ["length"]
    await server.stop()


async def test_a_stream_aborted_with_all_that_it_may_have_has_ended(vocabulary: Vocabulary) -> None:
    server = Aborting(8)
    await server.start()
    async with connected(vocabulary, server) as upstream:
        found = await aborted(upstream, server, upstream_request())
    assert len(server.orders) == 1
    assert sum(len(piece.ids) for piece in found) == 8
    assert found[-1].finish_reason == "length"
    await server.stop()


async def aborted(upstream: Upstream, server: Puppet, asked: UpstreamRequest) -> list[SampledChoice]:
    """A stream around which there was a pause."""
    running = asyncio.create_task(pieces(upstream, asked))
    await until(lambda: len(server.orders) == 1)
    await upstream.pause("abort-resume")
    await until(lambda: upstream.waiting == 1 or running.done())
    await upstream.resume()
    return await running


async def test_an_answer_that_follows_a_grammar_is_not_continued_in_its_middle(vocabulary: Vocabulary) -> None:
    server = Aborting(3)
    await server.start()
    async with connected(vocabulary, server) as upstream:
        running = asyncio.create_task(pieces(upstream, upstream_request(structured_outputs={"json": {}})))
        await until(lambda: len(server.orders) == 1)
        await upstream.pause("abort-resume")
        with pytest.raises(RolloutServerFailed, match="grammar"):
            await running
        await upstream.resume()
    await server.stop()


async def test_pausing_twice_and_resuming_what_is_not_paused_is_fine(own: Client, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, own.host) as upstream:
        await upstream.resume()
        for mode in ("keep", "keep", "abort-resume", "drain"):
            await upstream.pause(mode)
        assert upstream.paused
        await upstream.resume()
        await upstream.resume()
        assert not (await in_thread(own.get, "/is_paused"))["is_paused"]
        assert len((await upstream.sample(upstream_request())).choices[0].ids) == 8


@pytest.mark.parametrize("mode", ["keep", "abort-resume"])
async def test_a_server_that_cannot_pause_is_named_and_the_gate_opens(
    puppet: Make, vocabulary: Vocabulary, mode: Any
) -> None:
    able, unable = await puppet(), await puppet()
    unable.answers["/pause"] = (404, b"")
    async with connected(vocabulary, able, unable) as upstream:
        with pytest.raises(CannotPause, match=f"{unable.address}.*VLLM_SERVER_DEV_MODE=1"):
            await upstream.pause(mode)
        assert not upstream.paused
        assert [request.path for request in able.seen].count("/resume") == 1
        await upstream.sample(upstream_request())


async def test_a_server_that_died_does_not_keep_others_from_pausing(puppet: Make, vocabulary: Vocabulary) -> None:
    dead, alive = await puppet(), await puppet()
    async with connected(vocabulary, dead, alive, probe_s=60) as upstream:
        await dead.stop()
        await upstream.pause("keep")
        assert upstream.paused
        await upstream.resume()
        assert (await upstream.sample(upstream_request())).server == alive.address


async def test_a_mode_that_is_none_is_refused(vocabulary: Vocabulary) -> None:
    async with connected(vocabulary) as upstream:
        with pytest.raises(InvalidInput, match="drain, keep, abort-resume"):
            await upstream.pause("stop")  # type: ignore[arg-type]
        assert not upstream.paused


def joined(found: list[SampledChoice]) -> SampledChoice:
    """The pieces of one choice as one."""
    last = found[-1]
    assert all(piece.finish_reason is None for piece in found[:-1])
    assert [piece.consumed for piece in found[1:]] == [None] * (len(found) - 1)
    return SampledChoice(
        last.index,
        [token for piece in found for token in piece.ids],
        [value for piece in found for value in piece.log_probs or []],
        None,
        last.finish_reason,
        consumed=found[0].consumed,
        spans=last.spans,
    )


async def streams_from(first: int, request: Request, writer: Writer) -> None:
    for part in stream_of(request.json)[first:]:
        await send(writer, part)
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    await asyncio.Event().wait()
