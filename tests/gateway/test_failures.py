"""When things go wrong: rollout servers that fail, agents that hang up or ask again, answers that cannot be trusted.

In each case the agent is told in its own dialect, nothing is recorded that was not sampled, and the others go on.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from tests.gateway.kit import Running, running_gateway, told, until
from tests.gateway.rollout import (
    RETRY,
    Behaviour,
    Rollout,
    Say,
    answers,
    chat,
    error_of,
    events_of,
    in_front,
    scripted,
    uid_of,
    user,
)
from tests.gateway.wire import breaks, drips, hangs

from headrace import DataPool


@contextmanager
def hurried(gateway: Running, limit: str, seconds: float) -> Iterator[None]:
    """Calls that begin meanwhile give their server up that is silent for so long (`idle_s`), or takes so long in all
    (`call_s`)."""
    upstream = gateway.app.state.gateway.upstream
    patient = upstream.options
    upstream.options = msgspec.structs.replace(patient, **{limit: seconds})
    try:
        yield
    finally:
        upstream.options = patient


@pytest.fixture
def gateway(common: Running, rollout: Rollout) -> Running:
    """With its server up, whatever the test before did to it."""
    all_up(common)
    return common


def all_up(gateway: Running) -> None:
    until(lambda: all(s["state"] == "up" for s in told(gateway.get("/servers"))["servers"]))


def unrecorded(gateway: Running) -> dict[str, int]:
    return dict(gateway.counted("unrecorded"))


# -- rollout servers that fail -----------------------------------------------------------------------------------------

NO_IDS = Say(told_ids=False)
FAILURES: list[tuple[str, Behaviour | Say, int]] = [
    ("500", answers(500, {"error": {"message": "out of memory", "code": 500}}), 503),
    ("500 with a page", answers(500, b"<html>oops</html>"), 503),
    ("breaks", breaks, 503),
    ("404", answers(404, {"error": {"message": "no model"}}), 502),
    ("no JSON", answers(200, b'{"choices": [{"index": 0'), 502),
    ("no choices", answers(200, {"choices": []}), 502),
    ("another type", answers(200, {"choices": [{"index": 0, "text": 7}]}), 502),
    ("a list", answers(200, b"[]"), 502),
    ("nothing", answers(200, b""), 502),
    ("no ids", NO_IDS, 502),
    ("no tokens", Say(ids=[], ended=False), 502),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("behave", "status"), [pytest.param(b, s, id=name) for name, b, s in FAILURES])
def test_a_server_that_fails_is_an_error_and_no_step(
    gateway: Running, rollout: Rollout, behave: Behaviour | Say, status: int, stream: bool
) -> None:
    fails(gateway, rollout, behave, status, stream)


@pytest.mark.parametrize(
    ("behave", "stream", "status", "limit"),
    [
        (hangs, False, 503, "idle_s"),
        (hangs, True, 503, "idle_s"),
        (drips, False, 503, "idle_s"),
        (drips, True, 502, "call_s"),  # which is not silent
    ],
)
def test_a_server_that_never_ends_is_an_error_and_no_step(
    gateway: Running, rollout: Rollout, behave: Behaviour, stream: bool, status: int, limit: str
) -> None:
    fails(gateway, rollout, behave, status, stream, limit)


def fails(
    gateway: Running, rollout: Rollout, behave: Behaviour | Say, status: int, stream: bool, limit: str | None = None
) -> None:
    """A call that the server fails so, in the end by a limit, is told, counted and not recorded; the next one goes
    through."""
    base = gateway.init()["base_url"]
    before = sum(unrecorded(gateway).values())
    rollout.script += [behave, behave]  # a connection that breaks is tried twice
    with nullcontext() if limit is None else hurried(gateway, limit, 0.5):
        answer = chat(gateway, base, "hi", stream=stream)
    rollout.script.clear()
    if answer.headers["content-type"].startswith("text/event-stream"):
        fault = events_of(answer.text)[-1]["error"]
    else:
        fault = error_of(answer, status)
        assert ("retry-after" in answer.headers) == (status == 503)
    assert fault["type"] == "server_error"
    assert "Traceback" not in fault["message"]
    assert gateway.steps(uid_of(base)) == []
    assert sum(unrecorded(gateway).values()) == before + 1
    all_up(gateway)
    told(chat(gateway, base, "again"))
    assert [step.step_index for step in gateway.steps(uid_of(base))] == [0]


@pytest.mark.parametrize("then", [breaks, hangs], ids=["breaks", "hangs"])
def test_a_server_killed_in_mid_stream_ends_the_stream_with_an_error(
    gateway: Running, rollout: Rollout, base: str, then: Behaviour
) -> None:
    gate = rollout.gate()
    gate.open()
    for idle_s in (1, 10, 100):  # a busy machine may take longer than the first until the stream has begun
        all_up(gateway)
        rollout.script.append(Say("one two three four", after=(4, gate), then=then))
        with hurried(gateway, "idle_s", idle_s):
            answer = chat(gateway, base, "hi", stream=True)
        rollout.script.clear()
        if answer.status_code == 200:
            break
    assert answer.status_code == 200
    chunks = events_of(answer.text)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert set(chunks[-1]["error"]) == {"message", "type", "param", "code"}
    assert not any(choice.get("finish_reason") for chunk in chunks for choice in chunk.get("choices", ()))
    assert gateway.steps(uid_of(base)) == []


def test_the_others_carry_on(gateway: Running, rollout: Rollout, base: str, threads: ThreadPoolExecutor) -> None:
    gate = rollout.gate()
    rollout.script.append(Say("one two three", after=(2, gate)))
    body = {"messages": [user("slow")], "stream": True}
    slow = threads.submit(httpx.post, f"{base}/v1/chat/completions", json=body, timeout=240, trust_env=False)
    gate.reached()
    other = gateway.init()["base_url"]
    rollout.script.append(answers(200, b"nonsense"))
    error_of(chat(gateway, other, "hi"), 502)
    told(chat(gateway, other, "hi"))
    gate.open()
    assert slow.result(240).text.endswith("data: [DONE]\n\n")
    assert [len(gateway.steps(uid_of(url))) for url in (base, other)] == [1, 1]


def test_a_call_goes_to_another_server_before_its_first_token(rollout: Rollout, folder: Path) -> None:
    with (
        scripted(folder) as bad,
        DataPool() as pool,
        running_gateway(pool, [bad.address, rollout.address], folder) as gateway,
    ):
        base = gateway.init()["base_url"]
        bad.reply = lambda asked: answers(500, b"no")
        for number in range(4):
            all_up(gateway)
            told(chat(gateway, base, f"hi {number}", stream=False))
        assert bad.orders
        assert len(rollout.orders) == 4
        steps = gateway.steps(uid_of(base))
        assert [step.metadata["server"] for step in steps] == [rollout.address] * 4
        assert told(gateway.get("/stats"))["gateway"]["upstream"]["retries"] == len(bad.orders)
        bad.die()
        rollout.die()
        fault, unlisted = chat(gateway, base, "nobody"), gateway.get(f"{base}/v1/models")
        rollout.revive()
        assert error_of(fault, 503)["code"] == error_of(unlisted, 503)["code"] == "no_server"
        assert int(fault.headers["retry-after"]) >= 1


# -- servers that do not match -----------------------------------------------------------------------------------------


def test_a_server_of_another_model_keeps_the_gateway_from_being_ready(folder: Path) -> None:
    with scripted(folder) as other:
        other.refuses_probe = True
        with in_front(other, folder, until_ready=False) as gateway:
            until(lambda: "does not match" in gateway.get("/ready").text)
            assert gateway.get("/ready").status_code == 503
            assert gateway.get("/health").status_code == 200
            base = gateway.init()["base_url"]
            refused = chat(gateway, base, "hi")
            assert error_of(refused, 503)["code"] == "not_ready"
            assert "retry-after" in refused.headers
            assert other.orders == []


def test_servers_whose_log_probs_differ_keep_the_gateway_from_being_ready(rollout: Rollout, folder: Path) -> None:
    with scripted(folder) as raw, DataPool() as pool:
        raw.log_prob_mode = "raw"
        both = [raw.address, rollout.address]
        with running_gateway(pool, both, folder, until_ready=False) as gateway:
            until(lambda: "log-probs" in gateway.get("/ready").text)
        with running_gateway(pool, raw.address, folder, until_ready=False, logprobs_mode="processed") as gateway:
            until(lambda: "--logprobs-mode processed_logprobs" in gateway.get("/ready").text)


def test_a_tokenizer_that_cannot_be_loaded_is_said_and_does_not_hang(rollout: Rollout, tmp_path: Path) -> None:
    with in_front(rollout, tmp_path, until_ready=False) as gateway:
        until(lambda: str(tmp_path) in gateway.get("/ready").text)
        assert gateway.get("/ready").status_code == 503
        assert gateway.get("/health").json() == {"status": "ok"}
        made = gateway.init()
        assert chat(gateway, made["base_url"], "hi").status_code == 503
        assert gateway.post("/generate", {"prompt_ids": [1]}).status_code == 503
        assert error_of(gateway.get(f"{made['base_url']}/v1/models"), 503)["code"] == "not_ready"


# -- agents that hang up -----------------------------------------------------------------------------------------------


def left_alone(gateway: Running, before: int) -> None:
    until(lambda: unrecorded(gateway).get("agent_left", 0) == before + 1)


def test_an_agent_that_hangs_up_in_a_stream_aborts_it_upstream(gateway: Running, rollout: Rollout, base: str) -> None:
    before = unrecorded(gateway).get("agent_left", 0)
    gate = rollout.gate()
    rollout.script.append(Say("one two three four", after=(4, gate)))
    body = {"messages": [user("hi")], "stream": True}
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=240, trust_env=False) as answer:
        lines = answer.iter_lines()  # kept: a stream that nobody reads any more is closed
        assert next(lines).startswith("data: ")
        gate.reached()
    rollout.until(lambda: rollout.hung_up >= 1)
    left_alone(gateway, before)
    assert gateway.steps(uid_of(base)) == []
    told(chat(gateway, base, "hi"))
    assert len(gateway.steps(uid_of(base))) == 1


@pytest.mark.parametrize("route", ["chat/completions", "generate"])
def test_an_agent_that_hangs_up_while_it_waits_aborts_it_upstream(
    gateway: Running, rollout: Rollout, base: str, route: str
) -> None:
    before = unrecorded(gateway).get("agent_left", 0)
    gate = rollout.gate()
    rollout.script.append(Say(at=gate))
    where = urlsplit(base)
    path = f"{where.path}/v1/{route}" if route != "generate" else "/generate"
    body = json.dumps({"messages": [user("hi")]}).encode()
    with socket.create_connection((where.hostname, where.port)) as agent:
        agent.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        gate.reached()
    rollout.until(lambda: rollout.hung_up >= 1)
    if route != "generate":
        left_alone(gateway, before)
    assert gateway.steps(uid_of(base)) == []


def test_half_a_request_is_no_call(gateway: Running, rollout: Rollout, base: str) -> None:
    where = urlsplit(base)
    head = f"POST {where.path}/v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n"
    with socket.create_connection((where.hostname, where.port)) as agent:
        agent.sendall(head.encode() + b'{"messages": [')
        until(lambda: gateway.counted("in_flight") == 1)
    until(lambda: gateway.counted("in_flight") == 0)
    assert rollout.orders == []
    told(chat(gateway, base, "hi"))


# -- answers that cannot be trusted ------------------------------------------------------------------------------------

WRONG: list[tuple[str, Say]] = [
    ("log_prob_count", Say("hello", log_probs=[-0.5])),
    ("log_prob_count", Say("hello", log_probs=[-0.5] * 50)),
    ("log_prob_value", Say(ids=[40, 41], log_probs=[-0.5, None, -0.5])),
    ("log_prob_value", Say(ids=[40, 41], log_probs=[-0.5, 3.0, -0.5])),
    ("prompt_changed", Say("hello", prompt=[1, 2, 3])),
    ("text_differs", Say("hello", shown="something else")),
    ("unknown_token", Say(ids=[40, 10**6], shown="x")),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("reason", "say"), WRONG, ids=[f"{reason}-{at}" for at, (reason, _) in enumerate(WRONG)])
def test_a_step_that_fails_its_check_is_a_void_that_nothing_trains_on(
    gateway: Running, rollout: Rollout, reason: str, say: Say, stream: bool
) -> None:
    made = gateway.init(channel=f"{reason}-{stream}")
    channel, base, uid = f"{reason}-{stream}", made["base_url"], made["trajectory_uid"]
    before = gateway.counted("quarantined").get(channel, {}).get(reason, 0)
    rollout.script += ["good", say, "good too"]
    told(chat(gateway, base, "one"))
    assert chat(gateway, base, "two", stream=stream).status_code == 200
    told(chat(gateway, base, "three"))
    steps = gateway.steps(uid)
    assert [(step.step_index, step.quarantined) for step in steps] == [(0, None), (1, reason), (2, None)]
    assert gateway.counted("quarantined")[channel][reason] == before + 1
    assert gateway.complete(uid, reward=1.0) == {"status": "ok", "steps": 3}
    batch = gateway.pool.fetch_batch(1, channel=channel, timeout=60)
    assert batch is not None
    assert [step.step_index for step in batch.groups[0].steps] == [0, 2]
    assert len(batch.sequences()) == 2


def test_nothing_is_built_on_an_answer_that_cannot_be_trusted(gateway: Running, rollout: Rollout) -> None:
    made = gateway.init(channel="built")
    rollout.script += [Say("hello", log_probs=[-0.5]), "fine"]
    answer = told(chat(gateway, made["base_url"], "hi"))["choices"][0]["message"]
    told(chat(gateway, made["base_url"], [user("hi"), answer, user("more")]))
    causes = [step.metadata["cause"] for step in gateway.steps(made["trajectory_uid"])]
    assert causes == ["first", "first"]
    assert gateway.counted("prompts")["built"].get("extended", 0) == 0


# -- agents that ask again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_of_a_call_still_running_gets_its_answer(
    gateway: Running, rollout: Rollout, base: str, threads: ThreadPoolExecutor, stream: bool
) -> None:
    gate = rollout.gate()
    rollout.reply = lambda asked: Say("once", at=gate)
    before = gateway.counted("replayed")
    body = {"messages": [user("hi")], "stream": stream}

    def call(headers: Any) -> httpx.Response:
        url = f"{base}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=240, trust_env=False)

    first = threads.submit(call, None)
    gate.reached()
    second = threads.submit(call, RETRY)
    until(lambda: gateway.counted("in_flight") == 2)
    gate.open()
    both = [found.result(240) for found in (first, second)]
    assert [answer.status_code for answer in both] == [200, 200]
    if stream:
        texts = ["".join(c["choices"][0]["delta"].get("content") or "" for c in events_of(a.text)) for a in both]
        assert texts == ["once", "once"]
    else:
        assert both[0].json() == both[1].json()
    assert both[0].headers["x-headrace-call"] == both[1].headers["x-headrace-call"]
    assert len(rollout.orders) == len(gateway.steps(uid_of(base))) == 1
    assert gateway.counted("replayed") == before + 1


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_retry_of_a_call_that_was_answered_gets_the_same_answer(
    rollout: Rollout, folder: Path, common: Running, n: int, route: str, elsewhere: bool
) -> None:
    """Whether here, or by another process that only has the pool."""
    all_up(common)
    base = common.init()["base_url"]
    rollout.script.append(Say(tuple(f"answer {at} größer 🙂" for at in range(n))))
    body: Any = {"model": "m", "n": n, "max_tokens": 64, "logprobs": True, "return_token_ids": True}
    body |= {"messages": [user("hi")]} if route == "chat/completions" else {"prompt": "say", "logprobs": 0}
    url = f"/{uid_of(base)}/{uid_of(base)}/v1/{route}"
    first = told(common.post(url, body))
    if elsewhere:
        assert isinstance(common.pool, DataPool)
        with in_front(rollout, folder, common.pool) as other:
            again = told(other.post(url, body, headers=RETRY))
    else:
        again = told(common.post(url, body, headers=RETRY))
    for found in (first, again):
        found.pop("created")
    assert again == first
    assert len(rollout.orders) == 1
    assert len(common.steps(uid_of(base))) == n


def test_a_retry_of_a_call_that_failed_is_a_new_call(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += [answers(200, b"nonsense"), "fine"]
    error_of(chat(gateway, base, "hi"), 502)
    assert told(chat(gateway, base, "hi", headers=RETRY))["choices"][0]["message"]["content"] == "fine"
    assert len(gateway.steps(uid_of(base))) == 1


@pytest.mark.parametrize("count", [b"", b"-1", b"x", b"\xb2", b"1.5", b"9" * 5000])
def test_a_retry_count_that_is_none_is_no_error(gateway: Running, rollout: Rollout, base: str, count: bytes) -> None:
    told(chat(gateway, base, "hi", headers={b"x-stainless-retry-count": count}))
    assert len(gateway.steps(uid_of(base))) == 1


def test_a_retry_with_another_body_is_another_call(gateway: Running, rollout: Rollout, base: str) -> None:
    told(chat(gateway, base, "hi"))
    told(chat(gateway, base, "ho", headers=RETRY))
    assert len(gateway.steps(uid_of(base))) == 2


def test_the_same_request_on_purpose_twice_is_two_steps(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += ["one", "two"]
    found = [told(chat(gateway, base, "hi"))["choices"][0]["message"]["content"] for _ in range(2)]
    assert found == ["one", "two"]
    assert [step.step_index for step in gateway.steps(uid_of(base))] == [0, 1]


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_calls_beyond_the_bound_are_503_with_a_time_to_come_back(
    rollout: Rollout, folder: Path, threads: ThreadPoolExecutor
) -> None:
    with in_front(rollout, folder, max_in_flight=2) as gateway:
        base = gateway.init()["base_url"]
        gate = rollout.gate()
        rollout.reply = lambda asked: Say(at=gate)
        body = {"messages": [user("hi")]}
        url = f"{base}/v1/chat/completions"
        held = [threads.submit(httpx.post, url, json=body, timeout=240, trust_env=False) for _ in range(2)]
        rollout.until(lambda: len(rollout.orders) == 2)
        refused = chat(gateway, base, "hi")
        assert error_of(refused, 503)["code"] == "too_busy"
        assert int(refused.headers["retry-after"]) >= 1
        assert gateway.post("/generate", {"prompt_ids": [5]}).status_code == 503
        assert gateway.get("/health").status_code == 200
        gate.open()
        assert [found.result(240).status_code for found in held] == [200, 200]
        told(chat(gateway, base, "hi"))
        assert len(gateway.steps(uid_of(base))) == 3


def test_one_of_several_prompts_that_fails_fails_the_call(gateway: Running, rollout: Rollout, base: str) -> None:
    rollout.script += [Say("fine"), answers(200, b"[]")]
    refused = gateway.post(f"{base}/v1/completions", {"prompt": ["one", "two"], "max_tokens": 4})
    assert error_of(refused, 502)["code"] == "upstream_failed"
    assert gateway.steps(base.split("/")[-1]) == []
