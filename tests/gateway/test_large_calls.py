"""Calls that are far too large: refused before they cost much, and no other call waits for them."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.gateway.kit import Running, told, until
from tests.gateway.rollout import Rollout, chat, error_of, user

from headrace.gateway.planner import HUGE_CHARACTERS, INLINE_CHARACTERS
from headrace.gateway.request import (
    LARGE_BODY_BYTES,
    MAX_CALL_BYTES,
    MAX_CONTAINERS,
    MAX_TOOLS_BYTES,
    MAX_VALUES,
    CallReader,
    CallRequest,
)


@pytest.fixture
def gateway(common: Running, rollout: Rollout) -> Running:
    return common


TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 1000, "parameters": {"type": "object"}}}
TOO_MUCH: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("messages", {"messages": [user("")] * (MAX_CONTAINERS + 1)}, None, "objects and lists"),
    (
        "parts",
        {"messages": [user("x" * LARGE_BODY_BYTES), {"role": "user", "content": [{}] * MAX_CONTAINERS}]},
        None,
        "objects",
    ),
    ("values", {"messages": [user("hi")], "x": [0] * (MAX_VALUES + 2)}, None, "values"),
    ("unknown", {"messages": [user("hi")], "guide": "x" * (MAX_CALL_BYTES + 1)}, "guide", "guide has"),
    ("tools", {"messages": [user("hi")], "tools": [TOOL] * (MAX_TOOLS_BYTES // 1000)}, "tools", "tools have"),
]


@pytest.mark.parametrize(("fields", "param", "said"), [case[1:] for case in TOO_MUCH], ids=[c[0] for c in TOO_MUCH])
def test_more_than_any_model_reads_is_refused_by_what_it_is_too_much_of(
    gateway: Running, rollout: Rollout, base: str, fields: dict[str, Any], param: str | None, said: str
) -> None:
    body = json.dumps(fields, separators=(",", ":")).encode()
    error = error_of(gateway.post(f"{base}/v1/chat/completions", body), 400)
    assert said in error["message"]
    assert error["param"] == param
    assert not rollout.orders


def test_what_is_large_and_no_more_is_answered(gateway: Running, rollout: Rollout, base: str) -> None:
    fields = {"guide": "x" * (MAX_CALL_BYTES // 2), "messages": [user("hi")], "tools": [TOOL] * 10}
    told(gateway.post(f"{base}/v1/chat/completions", fields))
    assert rollout.orders[0]["guide"] == fields["guide"]


async def test_others_go_on_while_a_large_call_is_read() -> None:
    """Whoever reads it waits until others were heard: on the spot, nobody would be."""
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read(body: bytes) -> CallRequest:
        asyncio.run_coroutine_threadsafe(heard.wait(), loop).result(240)
        return CallRequest(model="m", sampling={})

    reader = CallReader()
    try:
        call = asyncio.ensure_future(reader.read(b" " * LARGE_BODY_BYTES, read, lambda body: "digest"))
        await asyncio.sleep(0)
        heard.set()
        assert (await call)[1] == "digest"
    finally:
        reader.close()


@pytest.mark.parametrize("text", ["x", "word " * 100])
def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    gateway: Running, rollout: Rollout, base: str, text: str
) -> None:
    """So it is not known how many tokens it has, but that they are too many."""
    whole = text * (HUGE_CHARACTERS * 8 // len(text))
    for path, asked in (("chat/completions", {"messages": [user(whole)]}), ("completions", {"prompt": whole})):
        error = error_of(gateway.post(f"{base}/v1/{path}", asked), 400)
        assert error["code"] == "context_length_exceeded"
        assert "at least" in error["message"]


def test_more_messages_than_tokens_are_refused_likewise(gateway: Running, rollout: Rollout, base: str) -> None:
    error = error_of(chat(gateway, base, [user("")] * (rollout.max_model_len + 1)), 400)
    assert error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]


def test_a_call_beside_huge_ones_is_answered_before_them(
    gateway: Running, rollout: Rollout, base: str, threads: ThreadPoolExecutor
) -> None:
    """Texts that have to be tokenised before they can be refused, one after the other; and a usual one meanwhile."""
    ended: list[str] = []

    def call(name: str, text: str) -> httpx.Response:
        url, body = f"{base}/v1/chat/completions", {"messages": [user(text)]}
        answer = httpx.post(url, json=body, timeout=240, trust_env=False)
        ended.append(name)
        return answer

    least, go = "y" * (HUGE_CHARACTERS + 1), threading.Event()
    gateway.app.state.gateway.calls.planner._for_huge.submit(go.wait, 240)  # so that none has ended before its time
    try:
        huge = [threads.submit(call, "huge", f"{number}{least}") for number in range(4)]
        until(lambda: gateway.counted("in_flight") >= 2)
        told(call("usual", "word " * INLINE_CHARACTERS))
    finally:
        go.set()
    assert [error_of(found.result(240), 400)["code"] for found in huge] == ["context_length_exceeded"] * 4
    assert ended[-1] == "huge"
