"""More comes than a gateway can carry: what was taken is finished, the rest is told at once to come back, and nothing
is recorded twice or kept for those who do not read."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.gateway.kit import Running, tokens, told, until
from tests.gateway.rollout import Json, Rollout, Say, chat, error_of, in_front, log_probs_of, uid_of, user
from tests.gateway.wire import Writer, begin_stream, event, respond, send

from headrace.gateway import admission
from headrace.gateway.admission import BODY_FACTOR, CALL_BYTES
from headrace.net.server import allow_files

PATIENCE_S = 240
#: Tokens of an answer that is more than the system's buffers take.
MANY = 20_000


@contextmanager
def connected(gateway: Running) -> Iterator[socket.socket]:
    """A connection of a client that takes little at a time."""
    where = urlsplit(gateway.address)
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        found.settimeout(PATIENCE_S)
        found.connect((where.hostname, where.port))
        yield found


def request(path: str, body: bytes, *, length: int | None = None, headers: str = "") -> bytes:
    told_length = len(body) if length is None else length
    head = f"POST {urlsplit(path).path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {told_length}\r\n\r\n"
    return head.encode() + body


def read_answer(connection: socket.socket) -> tuple[int, dict[str, str], Json]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1 << 16)
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    while len(body) < int(headers["content-length"]):
        body += connection.recv(1 << 16)
    return int(status.split()[1]), headers, json.loads(body)


def came_whole(connection: socket.socket) -> bool:
    """Whether all of an answer comes whose connection is closed behind it."""
    data = b""
    try:
        while part := connection.recv(1 << 20):
            data += part
    except ConnectionResetError:
        return False
    head, _, body = data.partition(b"\r\n\r\n")
    return f"content-length: {len(body)}".encode() in head


@pytest.fixture
def full(rollout: Rollout, folder: Path, threads: ThreadPoolExecutor) -> Iterator[tuple[Running, str]]:
    """A gateway that takes one call at once, and has it; with a trajectory's base_url."""
    with in_front(rollout, folder, max_in_flight=1) as gateway:
        base = gateway.init()["base_url"]
        gate = rollout.gate()
        rollout.script.append(Say(at=gate))
        held = threads.submit(chat, gateway, base, "hi")
        rollout.until(lambda: len(rollout.orders) == 1)
        yield gateway, base
        gate.open()
        assert held.result(PATIENCE_S).status_code == 200
        assert len(gateway.steps(uid_of(base))) == 1


def test_a_call_too_many_is_refused_in_its_dialect_before_its_body_has_come(full: tuple[Running, str]) -> None:
    gateway, base = full
    for path, kind in (
        ("chat/completions", "openai"),
        ("completions", "openai"),
        ("responses", "openai"),
        ("messages", "anthropic"),
    ):
        with connected(gateway) as connection:
            connection.sendall(request(f"{base}/v1/{path}", b"", length=100_000))
            status, headers, body = read_answer(connection)
        assert (status, headers["retry-after"]) == (503, "1")
        if kind == "openai":
            assert body["error"]["code"] == "too_busy"
            assert set(body["error"]) == {"message", "type", "param", "code"}
        else:
            assert body["type"] == "error"
            assert "try again" in body["error"]["message"]
    assert gateway.counted("refused") == {"calls": 4}


def test_health_readiness_and_control_are_answered_whatever_is_under_way(full: tuple[Running, str]) -> None:
    gateway, _ = full
    assert told(gateway.get("/health")) == {"status": "ok"}
    assert told(gateway.get("/ready")) == {"status": "ready"}
    told(gateway.post("/policy_version", {"version": 3}))
    assert gateway.counted("in_flight") == 1
    assert "headrace_gateway_refused_total" in gateway.get("/metrics").text


def test_what_calls_hold_is_bounded_by_their_bytes(rollout: Rollout, folder: Path, threads: ThreadPoolExecutor) -> None:
    with in_front(rollout, folder, memory_mb=1) as gateway:
        base = gateway.init()["base_url"]
        gate = rollout.gate()
        rollout.script.append(Say(at=gate))
        large = "x" * 100_000
        held = threads.submit(chat, gateway, base, large)
        rollout.until(lambda: len(rollout.orders) == 1)
        assert gateway.counted("memory")["bytes"] >= CALL_BYTES + BODY_FACTOR * len(large)

        refused = chat(gateway, base, large)
        assert error_of(refused, 503)["code"] == "too_busy"
        assert "--memory-mb" in error_of(refused, 503)["message"]
        assert chat(gateway, base, "small").status_code == 200
        with connected(gateway) as connection:  # one that does not tell its length is found out as it comes
            head = request(f"{base}/v1/chat/completions", b"", headers="transfer-encoding: chunked\r\nx-")
            connection.sendall(head.replace(b"x-content-length", b"x-length"))
            connection.sendall(b"%x\r\n%b\r\n" % (len(large), large.encode()))
            assert read_answer(connection)[0] == 503
        assert gateway.post("/submit_steps", b"[" + b" " * 100_000).status_code == 503
        assert gateway.post("/submit_steps", b"[").status_code == 400
        assert error_of(chat(gateway, base, "x" * 200_000), 413)["message"].startswith("the body is larger")

        gate.open()
        assert held.result(PATIENCE_S).status_code == 200
        assert chat(gateway, base, large).status_code == 200
        until(lambda: gateway.counted("memory")["bytes"] == 0)
        assert len(gateway.steps(uid_of(base))) == 3
        assert gateway.counted("refused") == {"memory": 3}


# -- clients that do not read ------------------------------------------------------------------------------------------


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are scarce whatever is held, and nobody may stop reading for a moment."""
    monkeypatch.setattr(admission, "SCARCE_SHARE", 0.0)
    monkeypatch.setattr(admission, "SCARCE_STALL_S", 0.0)


def endless(rollout: Rollout, left: threading.Event | None = None) -> Any:
    """Samples without end, as fast as it is read; `left` is set once nobody does."""

    async def behave(asked: Json, writer: Writer) -> None:
        word = rollout.vocabulary.encode("x")[:1]
        choice = rollout._choice(asked, 0, word, "x", [-0.5], None)
        await begin_stream(writer)
        await send(writer, event({"choices": [choice]}))
        more = event({"choices": [{**choice, "prompt_token_ids": None}]}) * 10
        try:
            while True:
                await send(writer, more)
                await asyncio.sleep(0)  # others are served too
        except BaseException:
            if left is not None:
                left.set()
            raise

    return behave


ASKED = {"messages": [user("hi")], "logprobs": True, "top_logprobs": 2}


def test_who_does_not_read_a_stream_makes_its_server_wait_and_is_let_go(
    rollout: Rollout, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()
    rollout.script.append(endless(rollout, left))
    with in_front(rollout, folder, stream_flush_ms="0") as gateway:
        base = gateway.init()["base_url"]
        with connected(gateway) as connection:
            body = json.dumps({**ASKED, "stream": True}).encode()
            connection.sendall(request(f"{base}/v1/chat/completions", body))
            until(lambda: gateway.counted("stalled") == 1)
            assert gateway.counted("in_flight") == 1
            assert not left.is_set(), "there is room for it"
            monkeypatch.setattr(admission, "SCARCE_STALL_S", 0.0)
            monkeypatch.setattr(admission, "SCARCE_SHARE", 0.0)
            assert left.wait(PATIENCE_S)
            until(lambda: gateway.counted("in_flight") == 0)
        until(lambda: gateway.counted("memory")["bytes"] == 0)
        assert gateway.counted("unrecorded") == {"agent_left": 1}
        assert gateway.steps(uid_of(base)) == []


def test_an_answer_that_was_not_read_is_recorded_once_and_given_again(
    rollout: Rollout, folder: Path, scarce: None
) -> None:
    ids = rollout.vocabulary.encode("x")[:1] * MANY

    async def much(asked: Json, writer: Writer) -> None:
        text = rollout.vocabulary.decode(ids)
        await respond(writer, 200, {"choices": [rollout._choice(asked, 0, ids, text, log_probs_of(ids), "length")]})

    rollout.script.append(much)
    with in_front(rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        body = json.dumps({**ASKED, "max_tokens": MANY}).encode()
        with connected(gateway) as connection:
            connection.sendall(request(f"{base}/v1/chat/completions", body))
            until(lambda: len(gateway.steps(uid_of(base))) == 1)
            until(lambda: gateway.counted("stalled") == 0 and gateway.counted("memory")["bytes"] == 0)
            assert not came_whole(connection)
        again = gateway.post(f"{base}/v1/chat/completions", body, headers={"x-stainless-retry-count": "1"})
        assert told(again)["usage"]["completion_tokens"] == MANY
        assert len(rollout.orders) == len(gateway.steps(uid_of(base))) == 1
        assert gateway.counted("replayed") == 1


# -- all of it at once -------------------------------------------------------------------------------------------------

AGENTS, TURNS, IDLE, SLOW = 12, 3, 1500, 20


def test_at_many_times_what_it_carries_everybody_gets_there_and_each_answer_is_one_step(
    rollout: Rollout, folder: Path
) -> None:
    """Idle connections by the thousand, streams that nobody reads, and agents that come back as often as it takes."""
    allow_files(4 * IDLE)
    carried = SLOW + 2
    gate, never = rollout.gate(), rollout.gate()
    with (
        in_front(rollout, folder, max_in_flight=carried) as gateway,
        ThreadPoolExecutor(AGENTS) as agents,
        ExitStack() as connections,
    ):
        for _ in range(IDLE):
            connections.enter_context(connected(gateway))
        rollout.reply = lambda asked: Say("a long story", after=(2, never))
        unread = [gateway.init()["base_url"] for _ in range(SLOW)]
        for base in unread:
            slow = connections.enter_context(connected(gateway))
            body = json.dumps({"messages": [user("hi")], "stream": True}).encode()
            slow.sendall(request(f"{base}/v1/chat/completions", body))
        rollout.until(lambda: len(rollout.orders) == SLOW)
        rollout.script += [Say("one", at=gate), Say("two", at=gate)]
        rollout.reply = lambda asked: "more"
        bases = [gateway.init()["base_url"] for _ in range(AGENTS)]
        working = [agents.submit(converse, base) for base in bases]
        until(lambda: gateway.counted("refused").get("calls", 0) >= AGENTS)
        assert told(gateway.get("/health")) == {"status": "ok"}
        gate.open()
        refusals = [found.result(PATIENCE_S) for found in working]
        assert max(refusals) > 0
        for base in bases:
            steps = gateway.steps(uid_of(base))
            assert [step.step_index for step in steps] == list(range(TURNS))
            for before, step in pairwise(steps):
                assert step.prompt_ids.tolist()[: len(tokens(before))] == tokens(before)
        assert len(rollout.orders) == SLOW + AGENTS * TURNS, "a call was sampled twice"
        assert [gateway.steps(uid_of(base)) for base in unread] == [[]] * SLOW
        connections.close()
        until(lambda: gateway.counted("in_flight") == 0 and gateway.counted("memory")["bytes"] == 0)


def converse(base: str) -> int:
    """A conversation, by a client that tries each call again as SDKs do until it is taken; how often it was refused."""
    messages: list[Json] = []
    refused = 0
    with httpx.Client(timeout=PATIENCE_S, trust_env=False) as http:
        for turn in range(TURNS):
            messages.append(user(f"turn {turn}"))
            tries = 0
            while True:
                headers = {"x-stainless-retry-count": str(tries)}
                answer = http.post(f"{base}/v1/chat/completions", json={"messages": messages}, headers=headers)
                if answer.status_code != 503:
                    break
                assert answer.headers["retry-after"] == "1"
                tries, refused = tries + 1, refused + 1
            messages.append(told(answer)["choices"][0]["message"])
    return refused
