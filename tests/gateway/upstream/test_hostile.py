"""Servers that fail in every way: bounded, counted, named; the request goes elsewhere while nobody has seen a token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.gateway.upstream.kit import (
    Behaviour,
    Puppet,
    Request,
    answers,
    completion,
    connected,
    drips_events,
    pieces,
    says,
    streamed,
    streams,
    until,
    upstream_request,
)
from tests.gateway.wire import Writer, begin_stream, breaks, drips, event, hangs, respond

from headrace.gateway.upstream import (
    NoRolloutServer,
    RolloutServerFailed,
    Upstream,
    UpstreamRefused,
    dispatch,
    http_client,
)
from headrace.tokens.vocabulary import Vocabulary

Make = Callable[..., Any]
ERROR = {"error": {"message": "no room for this", "type": "BadRequestError", "param": "n", "code": 400}}
IDS = list(range(10, 18))


def state(upstream: Upstream, server: Puppet) -> str:
    return str(next(found["state"] for found in upstream.describe() if found["address"] == server.address))


def later(first: Behaviour) -> Behaviour:
    """Misbehaves once, and answers from then on."""
    calls = []

    async def behave(request: Request, writer: Writer) -> None:
        calls.append(request)
        if len(calls) == 1:
            await first(request, writer)
        else:
            await respond(writer, 200, completion(request.json))

    return behave


async def cut_whole(request: Request, writer: Writer) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{"choices": [')
    await writer.drain()
    writer.close()


async def cut_stream(request: Request, writer: Writer) -> None:
    writer.transport.abort()


async def huge(request: Request, writer: Writer) -> None:
    await begin_stream(writer)
    while True:
        writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
        await writer.drain()


BEFORE_A_TOKEN = {
    "500": (answers(500, {"error": {"message": "engine dead", "code": 500}}), "status"),
    "503": (answers(503, b"overloaded"), "status"),
    "disconnects": (breaks, "unreachable"),
    "not json": (answers(200, b"<html>"), "malformed"),
    "no choices": (answers(200, {"id": "cmpl-1"}), "malformed"),
    "no ids": (answers(200, {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]}), "malformed"),
    "wrong types": (answers(200, {"choices": [{"index": 0, "text": 7, "token_ids": "x"}]}), "malformed"),
    "too few choices": (answers(200, {"choices": []}), "malformed"),
    "nested": (answers(200, b'{"choices": ' + b"[" * 100_000), "malformed"),
    "no utf-8": (answers(200, b'{"choices": [{"index": 0, "text": "\xff"}]}'), "malformed"),
    "cut": (cut_whole, "cut"),
    "redirect": (answers(302, b"", "location: http://127.0.0.1:9/"), "status"),
    "401": (answers(401, {"error": "Unauthorized"}), "denied"),
    "404": (answers(404, ERROR), "denied"),
    "429": (answers(429, ERROR), "busy"),
    "huge": (huge, "too_large"),
    "not http": (lambda request, writer: _raw(writer, b"220 ftp ready\r\n\r\n"), "malformed"),
}


async def _raw(writer: Writer, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


@pytest.mark.parametrize("name", BEFORE_A_TOKEN)
async def test_an_order_goes_elsewhere_when_its_server_fails(puppet: Make, vocabulary: Vocabulary, name: str) -> None:
    behave, kind = BEFORE_A_TOKEN[name]
    bad, good = await puppet(), await puppet()
    async with connected(vocabulary, bad, good, max_answer_mb=1, probe_s=60) as upstream:
        bad.behave = behave
        answer = await upstream.sample(upstream_request())
        assert (answer.server, answer.choices[0].ids) == (good.address, IDS)
        assert upstream.counters[f"failed_{kind}"] == 1
        assert upstream.counters["retries"] == 1
        assert upstream.in_flight == 0


@pytest.mark.parametrize("name", BEFORE_A_TOKEN)
async def test_a_failure_everywhere_is_said(puppet: Make, vocabulary: Vocabulary, name: str) -> None:
    behave, kind = BEFORE_A_TOKEN[name]
    servers = [await puppet(), await puppet()]
    async with connected(vocabulary, *servers, max_answer_mb=1, probe_s=60) as upstream:
        for server in servers:
            server.behave = behave
        nobody = kind in ("status", "unreachable", "busy")
        with pytest.raises(NoRolloutServer if nobody else RolloutServerFailed, match=r"http://127.0.0.1:\d+"):
            await upstream.sample(upstream_request())
        assert upstream.counters[f"failed_{kind}"] == 2


@pytest.mark.parametrize("name", ["500", "disconnects", "401", "cut"])
async def test_a_server_that_failed_is_passed_over_until_a_probe_finds_it_well(
    puppet: Make, vocabulary: Vocabulary, name: str
) -> None:
    behave, _ = BEFORE_A_TOKEN[name]
    bad, good = await puppet(), await puppet()
    async with connected(vocabulary, bad, good) as upstream:
        bad.behave = behave
        bad.answers["/health"] = (500, b"")
        await upstream.sample(upstream_request())
        assert state(upstream, bad) == "down"
        for _ in range(4):
            assert (await upstream.sample(upstream_request())).server == good.address
        bad.behave = None
        del bad.answers["/health"]
        await until(lambda: state(upstream, bad) == "up")
        assert {(await upstream.sample(upstream_request())).server for _ in range(2)} == {bad.address, good.address}


@pytest.mark.parametrize("name", ["429", "not json"])
async def test_a_busy_or_confused_server_stays_in_use(puppet: Make, vocabulary: Vocabulary, name: str) -> None:
    bad, good = await puppet(), await puppet()
    async with connected(vocabulary, bad, good, probe_s=60) as upstream:
        bad.behave = BEFORE_A_TOKEN[name][0]
        await upstream.sample(upstream_request())
        assert state(upstream, bad) == "up"


async def test_a_server_that_dies_is_passed_over_and_found_again(puppet: Make, vocabulary: Vocabulary) -> None:
    bad, good = await puppet(), await puppet()
    async with connected(vocabulary, bad, good) as upstream:
        await bad.stop()
        for _ in range(3):
            assert (await upstream.sample(upstream_request())).server == good.address
        assert state(upstream, bad) == "down"
        await bad.start(int(bad.address.rpartition(":")[2]))
        await until(lambda: state(upstream, bad) == "up")


async def test_an_idle_connection_that_was_closed_is_no_failure(
    puppet: Make, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "KEEP_ALIVE_S", 120)  # it is used again, however long a busy machine takes
    server = await puppet()
    async with connected(vocabulary, server) as upstream:
        server.behave = later(breaks)
        assert (await upstream.sample(upstream_request())).choices[0].ids == IDS
        assert upstream.counters["retries"] == 0
        assert state(upstream, server) == "up"


async def test_no_server_says_when_to_come_again(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    async with connected(vocabulary, server) as upstream:
        server.behave = answers(429, ERROR, "retry-after: 7")
        with pytest.raises(NoRolloutServer) as caught:
            await upstream.sample(upstream_request())
        assert caught.value.retry_after_s == 7
        assert upstream.counters["no_server"] == 1


async def test_a_refusal_is_the_agents_and_tried_nowhere_else(puppet: Make, vocabulary: Vocabulary) -> None:
    servers = [await puppet(), await puppet()]
    async with connected(vocabulary, *servers) as upstream:
        for server in servers:
            server.behave = answers(400, ERROR)
        for ask in (upstream.sample(upstream_request()), pieces(upstream, upstream_request())):
            with pytest.raises(UpstreamRefused) as caught:
                await ask
            assert (caught.value.status, caught.value.param, str(caught.value)) == (400, "n", "no room for this")
        assert upstream.counters["retries"] == 0
        assert [state(upstream, server) for server in servers] == ["up", "up"]


# -- time --------------------------------------------------------------------------------------------------------------


async def test_a_server_that_hangs_is_left_and_the_order_goes_elsewhere(puppet: Make, vocabulary: Vocabulary) -> None:
    bad, good = await puppet(), await puppet()
    async with connected(vocabulary, bad, good, idle_s=5, probe_s=60) as upstream:
        bad.behave = hangs
        assert (await upstream.sample(upstream_request())).server == good.address
        assert upstream.counters["failed_hang"] == 1
        await bad.hung_up.wait()


@pytest.mark.parametrize("behave", [drips, drips_events, hangs])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_order_ends_in_all_however_slowly_bytes_come(
    puppet: Make, vocabulary: Vocabulary, behave: Behaviour, streamed: bool
) -> None:
    bad = await puppet()
    async with connected(vocabulary, bad, idle_s=60, call_s=1.5) as upstream:
        bad.behave = behave
        with pytest.raises(RolloutServerFailed, match="call_s") as caught:
            await (pieces(upstream, upstream_request()) if streamed else upstream.sample(upstream_request()))
        assert caught.value.kind == "late"
        assert upstream.counters["failed_late"] == 1
        await bad.hung_up.wait()


async def test_other_orders_carry_on_while_one_server_hangs(puppet: Make, vocabulary: Vocabulary) -> None:
    bad, good = await puppet(), await puppet()
    async with connected(vocabulary, bad, good) as upstream:
        bad.behave = hangs
        held = asyncio.create_task(upstream.sample(upstream_request()))
        await until(lambda: len(bad.orders) == 1)
        await upstream.remove(bad.address)
        assert (await upstream.sample(upstream_request())).server == good.address
        held.cancel()
        await asyncio.wait([held])


# -- streams -----------------------------------------------------------------------------------------------------------

IN_A_STREAM = {
    "cut": (cut_stream, "cut"),
    "ends early": (says(b"data: [DONE]\n\n"), "cut"),
    "not json": (says(b"data: {\n\n"), "malformed"),
    "unknown choice": (says(event({"choices": [{"index": 3, "text": "", "token_ids": [1]}]})), "malformed"),
    "says 500": (says(event({"error": {"message": "engine dead", "code": 500}})), "status"),
    "unasked abort": (
        says(event({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "abort"}]})),
        "aborted",
    ),
}


@pytest.mark.parametrize("name", IN_A_STREAM)
async def test_a_stream_that_breaks_after_a_token_fails(puppet: Make, vocabulary: Vocabulary, name: str) -> None:
    behave, kind = IN_A_STREAM[name]
    bad, good = await puppet(), await puppet()
    async with connected(vocabulary, bad, good, probe_s=60) as upstream:
        seen = asyncio.Event()
        bad.behave = streams(2, behave, seen)
        stream = streamed(upstream, upstream_request())
        assert [(await anext(stream)).ids for _ in range(2)] == [[10], [11]]
        seen.set()
        with pytest.raises(RolloutServerFailed, match=bad.address) as caught:
            await anext(stream)
        assert caught.value.kind == kind
        assert upstream.counters[f"failed_{kind}"] == 1
        assert upstream.counters["aborted"] == upstream.in_flight == 0
        assert good.orders == []


@pytest.mark.parametrize("name", [name for name in IN_A_STREAM if "abort" not in name and "early" not in name])
async def test_a_stream_that_breaks_before_a_token_begins_elsewhere(
    puppet: Make, vocabulary: Vocabulary, name: str
) -> None:
    behave, kind = IN_A_STREAM[name]
    bad, good = await puppet(), await puppet()
    async with connected(vocabulary, bad, good, probe_s=60) as upstream:
        bad.behave = streams(0, behave)
        found = await pieces(upstream, upstream_request())
        assert [token for piece in found for token in piece.ids] == IDS
        assert {piece.server for piece in found} == {good.address}
        assert upstream.counters[f"failed_{kind}"] == 1


async def test_a_stream_that_falls_silent_fails(puppet: Make, vocabulary: Vocabulary) -> None:
    bad = await puppet()
    async with connected(vocabulary, bad, idle_s=2, probe_s=60) as upstream:
        bad.behave = streams(2, hangs)
        with pytest.raises(RolloutServerFailed) as caught:
            await pieces(upstream, upstream_request())
        assert caught.value.kind == "hang"
        await bad.hung_up.wait()


async def test_a_stream_without_end_is_bounded(puppet: Make, vocabulary: Vocabulary) -> None:
    bad = await puppet()
    async with connected(vocabulary, bad, max_answer_mb=1, probe_s=60) as upstream:
        bad.behave = huge
        with pytest.raises(RolloutServerFailed) as caught:
            await pieces(upstream, upstream_request())
        assert caught.value.kind == "too_large"


async def test_closing_a_stream_hangs_up(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    async with connected(vocabulary, server) as upstream:
        server.behave = streams(2, hangs)
        stream = streamed(upstream, upstream_request())
        await anext(stream)
        await stream.aclose()
        await server.hung_up.wait()
        assert upstream.counters["aborted"] == 1
        assert state(upstream, server) == "up"


async def test_the_connection_of_a_stream_is_used_again(
    puppet: Make, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "STREAM_TAIL_S", 120)  # on a busy machine a stream's last bytes may take their time
    monkeypatch.setattr(http_client, "KEEP_ALIVE_S", 120)
    server = await puppet()
    async with connected(vocabulary, server) as upstream:
        for _ in range(5):
            await pieces(upstream, upstream_request())
            await upstream.sample(upstream_request())
        assert server.opened == 1


async def test_a_key_for_the_servers_travels_with_every_request(puppet: Make, vocabulary: Vocabulary) -> None:
    server = await puppet()
    async with connected(vocabulary, server, api_key="secret") as upstream:
        await upstream.sample(upstream_request())
    assert {request.headers.get("authorization") for request in server.seen} == {"Bearer secret"}
