"""Orders against a real engine: what comes out is what the engine consumed and sampled, by either wire."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.engine.kit import Client, hold_until_resumed
from tests.gateway.upstream.kit import connected, pieces, streamed, until, upstream_request

from headrace.gateway.upstream import UpstreamRefused
from headrace.tokens.check import same_text
from headrace.tokens.vocabulary import Vocabulary

WIRES = ["completions", "generate"]
NAMES = {"completions": "cmpl", "generate": "generate-tokens"}


def recorded(engine: Client, wire: str, call_id: str) -> list[dict[str, Any]]:
    """What the engine says that it did, by choice."""
    name = f"{NAMES[wire]}-{call_id}"
    engine.recorded(name)
    return sorted(
        (call for call in engine.get("/debug/calls")["calls"] if call["request_id"] == name),
        key=lambda call: call["index"],
    )


@pytest.mark.parametrize("wire", WIRES)
async def test_a_whole_answer_is_what_the_engine_sampled(engine: Client, vocabulary: Vocabulary, wire: str) -> None:
    asked = upstream_request(n=2, seed=3, call_id=f"whole-{wire}")
    async with connected(vocabulary, engine.host, wire=wire) as upstream:
        answer = await upstream.sample(asked)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.server == f"http://{engine.host}"
    for choice, truth in zip(answer.choices, recorded(engine, wire, asked.call_id), strict=True):
        assert truth["prompt_token_ids"] == asked.prompt.tolist()
        assert choice.ids == truth["token_ids"]
        assert choice.log_probs == pytest.approx(truth["logprobs"], abs=1e-6)
        assert choice.consumed is asked.prompt
        assert choice.finish_reason == "length"


@pytest.mark.parametrize("wire", WIRES)
async def test_a_stream_is_what_the_engine_sampled(engine: Client, vocabulary: Vocabulary, wire: str) -> None:
    asked = upstream_request(n=2, seed=4, call_id=f"stream-{wire}")
    async with connected(vocabulary, engine.host, wire=wire) as upstream:
        found = await pieces(upstream, asked)
    for truth in recorded(engine, wire, asked.call_id):
        mine = [piece for piece in found if piece.index == truth["index"]]
        assert [token for piece in mine for token in piece.ids] == truth["token_ids"]
        assert [p for piece in mine for p in piece.log_probs] == pytest.approx(truth["logprobs"], abs=1e-6)
        assert mine[0].consumed is asked.prompt
        assert [piece.finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "length"


async def test_completions_carry_the_servers_text(engine: Client, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, engine.host, wire="completions") as upstream:
        (choice,) = (await upstream.sample(upstream_request(seed=5))).choices
        streamed = await pieces(upstream, upstream_request(seed=5))
    assert choice.text
    assert same_text(vocabulary, choice.ids, choice.text)
    assert "".join(piece.text for piece in streamed) == choice.text


async def test_a_stop_string_is_found_and_told(engine: Client, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, engine.host) as upstream:
        (free,) = (await upstream.sample(upstream_request(seed=6, max_tokens=32, top_logprobs=1))).choices
        stop = next(text for text in free.tokens or [] if len(text) > 1 and "\ufffd" not in text)
        (choice,) = (await upstream.sample(upstream_request(seed=6, max_tokens=32, stop=[stop]))).choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert free.ids[: len(choice.ids)] == choice.ids


async def test_alternatives_are_told_where_they_were_asked_for(engine: Client, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, engine.host) as upstream:
        (choice,) = (await upstream.sample(upstream_request(top_logprobs=3))).choices
        (plain,) = (await upstream.sample(upstream_request())).choices
    assert choice.tokens is not None
    assert choice.top is not None
    assert len(choice.tokens) == len(choice.top) == len(choice.ids)
    assert all(text in alternatives for text, alternatives in zip(choice.tokens, choice.top, strict=True))
    assert (plain.tokens, plain.top) == (None, None)


async def test_a_prompt_that_is_too_long_is_refused_in_the_servers_words(
    engine: Client, vocabulary: Vocabulary
) -> None:
    async with connected(vocabulary, engine.host) as upstream:
        for ask in (upstream.sample(upstream_request([5] * 3000)), pieces(upstream, upstream_request([5] * 3000))):
            with pytest.raises(UpstreamRefused, match="maximum context length is 2048") as caught:
                await ask
            assert (caught.value.status, caught.value.param) == (400, "input_tokens")
        assert upstream.describe()[0]["state"] == "up"
        assert upstream.counters["refused"] == 2


async def test_many_orders_at_once_keep_their_own_answers(engine: Client, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, engine.host) as upstream:
        asked = [upstream_request([5 + at], max_tokens=4, seed=at, call_id=f"many-{at}") for at in range(40)]
        found = await asyncio.gather(*(upstream.sample(one) for one in asked))
        for one, answer in zip(asked, found, strict=True):
            assert answer.choices[0].ids == recorded(engine, "generate", one.call_id)[0]["token_ids"]
        assert upstream.in_flight == 0
        assert upstream.describe()[0]["in_flight"] == 0


@pytest.mark.parametrize("wire", WIRES)
async def test_closing_a_stream_aborts_it_upstream(own: Client, vocabulary: Vocabulary, wire: str) -> None:
    asked = upstream_request(max_tokens=1500, ignore_eos=True, call_id="closed")
    async with connected(vocabulary, own.host, wire=wire) as upstream:
        await asyncio.to_thread(hold_until_resumed, own)
        stream = streamed(upstream, asked)
        await anext(stream)
        await stream.aclose()
        assert upstream.counters["aborted"] == 1
        assert upstream.in_flight == 0
        (truth,) = await asyncio.to_thread(recorded, own, wire, asked.call_id)
    assert truth["finish_reason"] == "abort"


@pytest.mark.parametrize("wire", WIRES)
async def test_cancelling_an_order_aborts_it_upstream(own: Client, vocabulary: Vocabulary, wire: str) -> None:
    asked = upstream_request(max_tokens=1500, ignore_eos=True, call_id="cancelled")
    async with connected(vocabulary, own.host, wire=wire) as upstream:
        await asyncio.to_thread(hold_until_resumed, own)
        task = asyncio.create_task(upstream.sample(asked))
        await until(lambda: any(call.request_id.endswith(asked.call_id) for call in list(own.engine.open)))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert upstream.counters["aborted"] == 1
        (truth,) = await asyncio.to_thread(recorded, own, wire, asked.call_id)
    assert truth["finish_reason"] == "abort"


async def test_a_stream_left_after_its_end_is_not_counted_as_aborted(engine: Client, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, engine.host) as upstream:
        stream = streamed(upstream, upstream_request())
        async for piece in stream:
            if piece.finish_reason is not None:
                break
        await stream.aclose()
        assert upstream.counters["aborted"] == 0


async def test_the_models_are_those_of_the_server(engine: Client, vocabulary: Vocabulary) -> None:
    async with connected(vocabulary, engine.host) as upstream:
        found = await upstream.models()
        assert [card["id"] for card in found["data"]] == ["tiny"]
        assert (upstream.model, upstream.max_model_len) == ("tiny", 2048)
        assert await upstream.models() is found
