"""Calls that are made again: each is answered once, however many others ask the same."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.gateway.kit import Running, told, until
from tests.gateway.rollout import RETRY, Rollout, Say, answers, chat, error_of, events_of, in_front, uid_of, user

from headrace import DataPool, Step
from headrace.gateway.retries import Retries, RunningCall

BODY = {"model": "m", "messages": [user("hi")]}


@pytest.fixture(scope="module")
def common(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder, open=True) as found:
        yield found


@pytest.fixture
def gateway(common: Running, rollout: Rollout) -> Running:
    until(lambda: all(server["state"] == "up" for server in told(common.get("/servers"))["servers"]))
    return common


def said(answer: httpx.Response) -> str:
    return str(told(answer)["choices"][0]["message"]["content"])


def tried(count: int) -> dict[str, str]:
    return {"x-stainless-retry-count": str(count)}


def key(name: str) -> dict[str, str]:
    return {"Idempotency-Key": name}


# -- equal calls -------------------------------------------------------------------------------------------------------


def test_of_equal_calls_the_one_that_failed_gets_an_answer_of_its_own(
    gateway: Running, rollout: Rollout, base: str
) -> None:
    rollout.script += ["one", answers(200, b"nonsense"), "two", "three"]
    assert said(chat(gateway, base, "hi")) == "one"
    error_of(chat(gateway, base, "hi"), 502)
    assert said(chat(gateway, base, "hi")) == "two"
    assert said(chat(gateway, base, "hi", headers=RETRY)) == "three"
    assert len(gateway.steps(uid_of(base))) == 3


def test_so_does_one_that_fails_again_and_again(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += ["one", *[answers(200, b"nonsense")] * 2, "two"]
    assert said(chat(gateway, base, "hi")) == "one"
    for count in (0, 1):
        error_of(chat(gateway, base, "hi", headers=tried(count)), 502)
    assert said(chat(gateway, base, "hi", headers=tried(2))) == "two"
    assert len(gateway.steps(uid_of(base))) == 2


def test_beside_equal_calls_that_are_under_way_a_retry_is_the_call_that_never_came(
    gateway: Running, rollout: Rollout, base: str, threads: ThreadPoolExecutor
) -> None:
    gate = rollout.gate()
    rollout.script += [Say("one", at=gate), Say("two", at=gate), "three"]
    url = f"{base}/v1/chat/completions"
    held = [threads.submit(httpx.post, url, json=BODY, timeout=240, trust_env=False) for _ in range(2)]
    rollout.until(lambda: len(rollout.orders) == 2)
    third = said(chat(gateway, base, "hi", headers=RETRY))
    gate.open()
    assert sorted([third, *(said(found.result(240)) for found in held)]) == ["one", "three", "two"]
    assert len(gateway.steps(uid_of(base))) == 3


# -- answers that are lost ---------------------------------------------------------------------------------------------


class Held:
    """Holds steps up before they are kept, while `closed`."""

    def __init__(self) -> None:
        self.closed = False
        self.reached = threading.Event()
        self.open = threading.Event()

    async def keep(self, step: Step) -> bool:
        if self.closed:
            self.reached.set()
            assert await asyncio.to_thread(self.open.wait, 240)
        return True


held = Held()


async def keep(step: Step) -> bool:
    return await held.keep(step)


@pytest.mark.parametrize("stream", [False, True])
def test_of_equal_calls_a_retry_gets_the_answer_that_was_lost(
    rollout: Rollout, folder: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(f"{__name__}.held", Held())
    with in_front(rollout, folder, redact=f"{__name__}:keep") as gateway:
        base = gateway.init()["base_url"]
        rollout.script += ["one", "two", "three"]
        body = json.dumps({**BODY, "stream": stream}).encode()
        heard = gateway.post(f"{base}/v1/chat/completions", body)
        held.closed = True
        hung_up(f"{base}/v1/chat/completions", body, held.reached)
        told(gateway.get("/health"))
        told(gateway.get("/health"))  # the gateway has seen that nobody is there
        held.closed = False
        held.open.set()
        until(lambda: len(gateway.steps(uid_of(base))) == 2 and gateway.counted("in_flight") == 0)
        again = gateway.post(f"{base}/v1/chat/completions", body, headers=RETRY)
        texts = [answer_of(each.text) if stream else said(each) for each in (heard, again)]
        assert texts == ["one", "two"]
        assert (len(rollout.orders), gateway.counted("replayed")) == (2, 1)


def hung_up(url: str, data: bytes, sampled: threading.Event) -> None:
    """Makes a call, and hangs up once it is sampled."""
    parts = urlsplit(url)
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=240) as connection:
        head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        assert sampled.wait(240)


def answer_of(text: str) -> str:
    chunks = [chunk for chunk in events_of(text) if chunk.get("choices")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_stream_given_again_has_the_ids_and_log_probs_of_the_first(
    gateway: Running, rollout: Rollout, base: str, route: str, n: int
) -> None:
    rollout.script.append(Say(tuple(f"answer {at} größer 🙂" for at in range(n))))
    body: Any = {"model": "m", "n": n, "stream": True, "return_token_ids": True}
    body |= {"messages": [user("hi")], "logprobs": True} if "chat" in route else {"prompt": "say", "logprobs": 0}
    first, again = (
        gathered(gateway.post(f"{base}/v1/{route}", body, headers=headers).text) for headers in (None, RETRY)
    )
    assert len(first) == n
    assert all(ids and values for ids, values in first)
    assert again == first
    assert len(rollout.orders) == 1


def gathered(text: str) -> list[tuple[list[int], list[float]]]:
    """The ids and log-probs of each choice of a stream."""
    found: dict[int, tuple[list[int], list[float]]] = {}
    for chunk in events_of(text):
        for row in chunk["choices"]:
            ids, values = found.setdefault(row["index"], ([], []))
            ids += row.get("token_ids") or []
            shown = row.get("logprobs") or {}
            values += shown.get("token_logprobs") or [entry["logprob"] for entry in shown.get("content") or []]
    return [found[index] for index in sorted(found)]


# -- calls with a name of their own ------------------------------------------------------------------------------------


def test_a_key_says_which_call_it_is(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += ["one", answers(200, b"nonsense"), "two", "three"]
    assert said(chat(gateway, base, "hi", headers=key("a"))) == "one"
    error_of(chat(gateway, base, "hi", headers=key("b")), 502)
    assert said(chat(gateway, base, "hi", headers={**key("b"), **RETRY})) == "two"
    assert said(chat(gateway, base, "hi")) == "three"
    for name, text in {"a": "one", "b": "two"}.items():
        assert said(chat(gateway, base, "hi", headers=key(name))) == text
    assert len(gateway.steps(uid_of(base))) == 3


def test_calls_with_one_key_that_are_made_at_once_are_one(
    gateway: Running, rollout: Rollout, base: str, threads: ThreadPoolExecutor
) -> None:
    url = f"{base}/v1/chat/completions"
    options: Any = {"json": BODY, "headers": key("a"), "timeout": 240, "trust_env": False}
    calls = [threads.submit(httpx.post, url, **options) for _ in range(6)]
    assert {said(found.result(240)) for found in calls} == {"ok"}
    assert len(rollout.orders) == len(gateway.steps(uid_of(base))) == 1


@pytest.mark.parametrize(("first", "again"), [(key("k"), key("k")), ({}, RETRY)], ids=["with a key", "counted"])
def test_tries_that_waited_for_one_that_failed_are_one_call(
    gateway: Running,
    rollout: Rollout,
    base: str,
    threads: ThreadPoolExecutor,
    first: dict[str, str],
    again: dict[str, str],
) -> None:
    gate = rollout.gate()
    rollout.script += [Say("never read", at=gate, told_ids=False), "one", "two"]
    failing = threads.submit(chat, gateway, base, "hi", headers=first)
    gate.reached()
    waiting = [threads.submit(chat, gateway, base, "hi", headers=again) for _ in range(2)]
    until(lambda: told(gateway.get("/stats"))["gateway"]["in_flight"] == 3)
    gate.open()
    error_of(failing.result(), 502)
    assert [said(call.result()) for call in waiting] == ["one", "one"]
    assert len(gateway.steps(uid_of(base))) == 1


def test_a_key_holds_in_a_process_that_only_has_the_pool(
    gateway: Running, rollout: Rollout, base: str, folder: Path
) -> None:
    rollout.script += ["one", "two"]
    found = [said(chat(gateway, base, "hi", headers=key(name))) for name in ("a", "b")]
    assert isinstance(gateway.pool, DataPool)
    with in_front(rollout, folder, gateway.pool) as other:
        url = f"/{uid_of(base)}/{uid_of(base)}/v1/chat/completions"
        assert [said(other.post(url, BODY, headers=key(name))) for name in ("a", "b")] == found
    assert len(rollout.orders) == 2


# -- a live service ----------------------------------------------------------------------------------------------------


def test_of_equal_first_calls_to_a_live_service_the_one_that_failed_is_a_conversation_of_its_own(
    gateway: Running, rollout: Rollout
) -> None:
    rollout.script += ["one", answers(200, b"nonsense"), "two"]
    body = {"messages": [user("a question that two people ask")]}
    assert said(gateway.post("/v1/chat/completions", body)) == "one"
    error_of(gateway.post("/v1/chat/completions", body), 502)
    assert said(gateway.post("/v1/chat/completions", body, headers=RETRY)) == "two"


# -- the end -----------------------------------------------------------------------------------------------------------


def test_the_same_end_again_says_that_it_counted(gateway: Running, rollout: Rollout, base: str) -> None:
    told(chat(gateway, base, "hi"))
    ended = gateway.complete(uid_of(base), reward=1.0)
    assert ended == {"status": "ok", "steps": 1}
    assert gateway.pool.fetch_batch(1, timeout=0) is not None
    assert gateway.complete(uid_of(base), reward=1.0) == ended
    assert gateway.complete(uid_of(base), reward=0.5)["status"] == "late"


async def test_a_retry_is_answered_as_the_call_that_it_repeats_or_told_that_it_failed() -> None:
    answered, failed = (RunningCall("digest", 0, Retries()) for _ in range(2))
    waiting = [asyncio.create_task(call.outcome()) for call in (answered, failed)]
    await asyncio.sleep(0)
    answered.answer.set_result([])
    failed.answer.cancel()
    assert await asyncio.gather(*waiting) == [[], None]


@pytest.mark.parametrize("first", ["the call", "its retry"])
async def test_a_retry_that_is_cancelled_with_the_call_that_it_repeats_ends(first: str) -> None:
    """As where the client of both dies: to try anew would sample for nobody."""
    call = RunningCall("digest", 0, Retries())
    retry = asyncio.create_task(call.outcome())
    await asyncio.sleep(0)
    for ended in (call.answer, retry) if first == "the call" else (retry, call.answer):
        ended.cancel()
    with pytest.raises(asyncio.CancelledError):
        await retry
