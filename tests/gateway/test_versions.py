"""Policy versions by step and by token, pauses around a weight sync, and rollout servers that come and go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.kit import Client, hold_until_resumed
from tests.gateway.kit import Evidence, Running, running_gateway, told, until
from tests.gateway.rollout import (
    Rollout,
    Say,
    answers,
    chat,
    content_of,
    events_of,
    in_front,
    scripted,
    uid_of,
    user,
)

from headrace import DataPool
from headrace.data.adapter_name import new_adapter_name


@pytest.fixture(scope="module")
def front(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder, keep_alive_s=0.02) as found:
        yield found


def later(threads: ThreadPoolExecutor, base: str, **body: Any) -> Future[httpx.Response]:
    given = {"messages": [user("hi")], **body}
    return threads.submit(httpx.post, f"{base}/v1/chat/completions", json=given, timeout=240, trust_env=False)


# -- versions ----------------------------------------------------------------------------------------------------------


def test_each_step_carries_the_version_that_sampled_it(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        assert told(gateway.get("/policy_version")) == {"version": 0, "servers": {rollout.address: 0}}
        seen = []
        for version in (0, 3, 4):
            if version:
                shown = told(gateway.post("/policy_version", {"version": version}))
                assert shown == {"version": version, "servers": {rollout.address: version}}
            answer = chat(gateway, base, "hi")
            assert answer.headers["x-headrace-policy-version"] == str(version)
            seen.append(version)
        steps = gateway.steps(uid_of(base))
        assert [step.policy_version for step in steps] == seen
        assert [step.version_spans for step in steps] == [None] * 3
        assert gateway.pool.stats()["channels"]["train"]["policy_version"] == 4


def test_a_version_that_is_an_adapter_is_sampled_with_it_whatever_model_a_call_names(
    rollout: Rollout, folder: Path
) -> None:
    adapter = new_adapter_name(3)
    with in_front(rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        for version, name in ((2, None), (3, adapter), (4, None)):
            told(gateway.post("/policy_version", {"version": version, "server": rollout.address, "adapter": name}))
            told(chat(gateway, base, "hi", model="scripted"))
            assert rollout.orders[-1]["model"] == (name or "scripted")
            assert told(gateway.get("/servers"))["servers"][0]["adapter"] == name
        assert [step.policy_version for step in gateway.steps(uid_of(base))] == [2, 3, 4]


def test_a_gateway_that_is_started_anew_finds_the_adapter_of_the_version(folder: Path) -> None:
    old, adapter = new_adapter_name(6), new_adapter_name(7)
    with scripted(folder) as rollout:
        rollout.adapters, rollout.weight_version = (old, adapter, "somebodys"), "7"
        with in_front(rollout, folder) as gateway:
            told(chat(gateway, gateway.init()["base_url"], "hi"))
            assert rollout.orders[-1]["model"] == adapter
            assert told(gateway.get("/policy_version"))["version"] == 7
        rollout.weight_version = "8"  # all weights, since
        with in_front(rollout, folder) as gateway:
            told(chat(gateway, gateway.init()["base_url"], "hi"))
            assert rollout.orders[-1]["model"] == "scripted"


def test_servers_may_differ_for_a_while(rollout: Rollout, folder: Path) -> None:
    with (
        scripted(folder) as other,
        DataPool() as pool,
        running_gateway(pool, [rollout.address, other.address], folder) as gateway,
    ):
        told(gateway.post("/policy_version", {"version": 5, "server": f"{other.address}/"}))
        shown = told(gateway.get("/policy_version"))
        assert shown == {"version": 5, "servers": {rollout.address: 0, other.address: 5}}
        base = gateway.init()["base_url"]
        for _ in range(4):
            told(chat(gateway, base, "hi"))
        by_server = {(s.metadata["server"], s.policy_version) for s in gateway.steps(uid_of(base))}
        assert by_server == {(rollout.address, 0), (other.address, 5)}


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]"),
        *({}, {"version": -1}, {"version": "3"}, {"version": 1.5}, {"version": 2**40}, {"version": True}),
        *({"version": 1, "server": "http://127.0.0.1:1"}, {"version": 1, "server": ""}, {"version": 1, "x": 1}),
    ],
    ids=str,
)
def test_a_version_that_cannot_be_is_refused(front: Running, body: Any) -> None:
    before = told(front.get("/policy_version"))
    assert front.post("/policy_version", body).status_code == 400
    assert told(front.get("/policy_version")) == before


def test_a_version_below_the_last_is_refused_and_holds_nowhere(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        told(gateway.post("/policy_version", {"version": 7}))
        refused = gateway.post("/policy_version", {"version": 3})
        assert refused.status_code == 400
        assert "7" in refused.json()["detail"]
        assert told(gateway.get("/policy_version")) == {"version": 7, "servers": {rollout.address: 7}}
        told(chat(gateway, base, "hi"))
        assert [step.policy_version for step in gateway.steps(uid_of(base))] == [7]


def test_an_answer_that_straddles_a_sync_carries_its_spans(front: Running, rollout: Rollout) -> None:
    base = front.init()["base_url"]
    told(front.post("/policy_version", {"version": 7}))
    gate = rollout.gate()
    rollout.script.append(Say(ids=[40, 41, 42, 43, 44, 45], after=(4, gate)))
    body = {"messages": [user("hi")], "stream": True, "return_token_ids": True}
    seen: list[int] = []
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=240, trust_env=False) as answer:
        lines = answer.iter_lines()
        while len(seen) < 4:
            line = next(lines)
            if line.startswith("data: {"):
                seen += json.loads(line[6:])["choices"][0].get("token_ids", [])
        told(front.post("/policy_version", {"version": 8}))
        gate.open()
        assert "data: [DONE]" in list(lines)
    (step,) = front.steps(uid_of(base))
    assert step.policy_version == 7
    assert step.version_spans == ((0, 7), (4, 8))


# -- pauses, scripted --------------------------------------------------------------------------------------------------


def test_while_paused_new_calls_are_held_without_an_error(
    front: Running, rollout: Rollout, threads: ThreadPoolExecutor
) -> None:
    base = front.init()["base_url"]
    assert told(front.post("/pause")) == {"status": "paused", "mode": "drain", "lease_s": 900.0}
    try:
        calls = [later(threads, base, stream=stream) for stream in (True, False)]
        until(lambda: front.counted("held") == 2)
        assert front.counted("paused") is True
        assert not any(call.done() for call in calls)
        assert rollout.orders == []
    finally:
        told(front.post("/resume"))
    streamed, whole = (call.result(240) for call in calls)
    assert content_of(streamed.text) == whole.json()["choices"][0]["message"]["content"] == "ok"
    assert len(front.steps(uid_of(base))) == 2


def test_a_held_stream_gets_comments_that_no_client_minds(front: Running, rollout: Rollout) -> None:
    base = front.init()["base_url"]
    told(front.post("/pause"))
    body = {"messages": [user("hi")], "stream": True}
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=240, trust_env=False) as answer:
        lines = answer.iter_lines()
        comments = [next(lines) for _ in range(5)]
        assert [line for line in comments if line] == [": keep-alive"] * 3
        told(front.post("/resume"))
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[0][6:])["choices"][0]["delta"]["role"] == "assistant"
    assert len(front.steps(uid_of(base))) == 1


def test_a_held_stream_that_fails_ends_with_an_error_event(front: Running, rollout: Rollout) -> None:
    base = front.init()["base_url"]
    told(front.post("/pause"))
    rollout.script.append(answers(400, {"error": {"message": "never", "code": 400}}))
    body = {"messages": [user("hi")], "stream": True}
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=240, trust_env=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        told(front.post("/resume"))
        (fault, done) = [line for line in lines if line.startswith("data: ")]
    assert json.loads(fault[6:])["error"]["message"] == "never"
    assert done == "data: [DONE]"
    assert front.steps(uid_of(base)) == []


def test_a_client_that_leaves_while_it_is_held_is_let_go(front: Running, rollout: Rollout) -> None:
    base = front.init()["base_url"]
    told(front.post("/pause"))
    body = {"messages": [user("hi")], "stream": True}
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body, timeout=240, trust_env=False) as answer:
        lines = answer.iter_lines()  # kept: a stream that nobody reads any more is closed
        next(lines)
        until(lambda: front.counted("held") == 1)
    until(lambda: front.counted("held") == 0)
    told(front.post("/resume"))
    assert rollout.orders == []


def test_drain_waits_for_calls_in_flight(front: Running, rollout: Rollout, threads: ThreadPoolExecutor) -> None:
    base = front.init()["base_url"]
    gate = rollout.gate()
    rollout.script.append(Say("one two three", after=(3, gate)))
    call = later(threads, base, stream=True)
    gate.reached()
    pause = threads.submit(front.post, "/pause?mode=drain", timeout=60)
    until(lambda: front.counted("paused") is True)
    assert not pause.done()
    gate.open()
    assert pause.result(240).status_code == 200
    assert content_of(call.result(240).text) == "one two three"
    told(front.post("/resume"))


@pytest.mark.parametrize("mode", ["sleep", "", "DRAIN", "keep,drain"])
def test_a_pause_of_no_known_mode_is_refused(front: Running, mode: str) -> None:
    assert front.post(f"/pause?mode={mode}").status_code == 400
    assert front.counted("paused") is False


def test_a_server_that_cannot_be_paused_leaves_the_gateway_open(
    front: Running, rollout: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = rollout._answer

    async def without(path: str, asked: Any, writer: Any) -> None:
        await answer("/nowhere" if path.startswith("/pause") else path, asked, writer)

    monkeypatch.setattr(rollout, "_answer", without)
    refused = front.post("/pause?mode=keep")
    assert refused.status_code in (500, 502, 503)
    assert "VLLM_SERVER_DEV_MODE" in refused.json()["detail"]
    assert front.counted("paused") is False
    told(chat(front, front.init()["base_url"], "hi"))


# -- pauses, against a real engine -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "stream", "wire"),
    [
        ("keep", True, "completions"),
        pytest.param("keep", False, "generate", marks=pytest.mark.long),
        pytest.param("abort-resume", True, "completions", marks=pytest.mark.long),
        pytest.param("abort-resume", False, "completions", marks=pytest.mark.long),
        ("abort-resume", True, "generate"),
    ],
)
def test_an_answer_goes_on_under_the_new_weights(
    own: Client, folder: Path, threads: ThreadPoolExecutor, mode: str, stream: bool, wire: str
) -> None:
    with (
        DataPool() as pool,
        running_gateway(pool, f"http://{own.host}", folder, wire=wire) as gateway,
    ):
        evidence = Evidence(own)
        hold_until_resumed(own, steps=8)
        base = gateway.init()["base_url"]
        body = {"max_tokens": 1000, "ignore_eos": True, "stream": stream, "return_token_ids": True}
        call = later(threads, base, **body)
        until(lambda: any(len(s.output) > 3 for c in list(own.engine.open) for s in c.sequences))
        told(gateway.post(f"/pause?mode={mode}"))
        assert not call.done()
        own.post("/update_weight_version", {"new_version": "9"})
        told(gateway.post("/policy_version", {"version": 9}))
        told(gateway.post("/resume"))
        answer = call.result(240)
        assert answer.status_code == 200
        (step,) = gateway.steps(uid_of(base))
        if stream:
            chunks = events_of(answer.text)
            ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids") or ()]
        else:
            ids = answer.json()["choices"][0]["token_ids"]
        assert step.response_ids.tolist() == ids
        assert len(ids) == 1000
        parts = sorted(evidence.calls(), key=lambda part: len(part["prompt_token_ids"]))
        assert [token for part in parts for token in part["token_ids"]] == ids
        if mode == "keep":
            assert step.quarantined is None
        assert step.version_spans is not None
        assert [version for _, version in step.version_spans] == [0, 9]
        assert step.policy_version == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("text", ["one two three", "one 🙂 three"], ids=["between letters", "inside a letter"])
def test_an_answer_cut_by_a_pause_is_one_answer_wherever_it_was_cut(
    front: Running, rollout: Rollout, threads: ThreadPoolExecutor, text: str, stream: bool
) -> None:
    base = front.init()["base_url"]
    ids = rollout.vocabulary.encode(text)
    cut = next(at for at in range(1, len(ids)) if rollout.vocabulary.decode(ids[:at]).startswith("one ")) + 1
    gate = rollout.gate()
    where = {"after": (cut - 1, gate)} if stream else {"at": gate}
    rollout.script += [Say(ids=ids[:cut], ended=False, finish="abort", **where), Say(ids=ids[cut:])]
    call = later(threads, base, stream=stream)
    gate.reached()
    told(front.post("/pause?mode=abort-resume"))
    gate.open()
    assert "/pause?mode=abort" in rollout.controls
    told(front.post("/resume"))
    answer = call.result(240)
    said = content_of(answer.text) if stream else told(answer)["choices"][0]["message"]["content"]
    (step,) = front.steps(uid_of(base))
    assert step.response_ids.tolist() == [*ids, rollout.end]
    assert rollout.orders[1]["prompt"] == [*rollout.orders[0]["prompt"], *ids[:cut]]
    assert said == text
    assert step.quarantined is None


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_was_cut_inside_a_stop_string_and_went_on_behind_it_is_not_trained_on(
    front: Running, rollout: Rollout, threads: ThreadPoolExecutor, stream: bool
) -> None:
    """Its server looked for the whole string in what followed the cut; its agent reads up to it all the same."""
    base = front.init()["base_url"]
    first, rest = (rollout.vocabulary.encode(part) for part in ("so it is.</ans", "wer> and more"))
    gate = rollout.gate()
    where = {"after": (len(first) - 1, gate)} if stream else {"at": gate}
    rollout.script += [Say(ids=first, ended=False, finish="abort", **where), Say(ids=rest)]
    call = later(threads, base, stream=stream, stop=["</answer>"])
    gate.reached()
    told(front.post("/pause?mode=abort-resume"))
    gate.open()
    told(front.post("/resume"))
    answer = call.result(240)
    said = content_of(answer.text) if stream else told(answer)["choices"][0]["message"]["content"]
    (step,) = front.steps(uid_of(base))
    assert said == "so it is."
    assert step.quarantined == "past_stop"


def test_a_drain_that_is_ended_before_its_calls_is_no_pause(
    front: Running, rollout: Rollout, threads: ThreadPoolExecutor
) -> None:
    base = front.init()["base_url"]
    gate = rollout.gate()
    rollout.script.append(Say("one two three", after=(3, gate)))
    call = later(threads, base, stream=True)
    gate.reached()
    pause = threads.submit(front.post, "/pause?mode=drain", timeout=240)
    until(lambda: front.counted("paused") is True)
    told(front.post("/resume"))
    refused = pause.result(240)
    assert (refused.status_code, refused.json()["code"]) == (409, "pause_ended")
    gate.open()
    assert content_of(call.result(240).text) == "one two three"
    assert front.counted("paused") is False


# -- servers that come and go ------------------------------------------------------------------------------------------


def test_servers_are_added_and_removed_while_calls_run(
    rollout: Rollout, folder: Path, threads: ThreadPoolExecutor
) -> None:
    with scripted(folder) as other, in_front(rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        shown = told(gateway.post("/servers", {"address": other.address}))["servers"]
        assert {(s["address"], s["state"]) for s in shown} == {(rollout.address, "up"), (other.address, "up")}
        for _ in range(4):
            told(chat(gateway, base, "hi"))
        assert (len(rollout.orders), len(other.orders)) == (2, 2)
        gate = rollout.gate()
        rollout.reply = lambda asked: Say(at=gate)
        other.reply = lambda asked: "from the other"
        calls = [later(threads, base) for _ in range(2)]
        gate.reached()
        removed = gateway.http.request("DELETE", "/servers", json={"address": rollout.address})
        assert {s["address"]: s["state"] for s in told(removed)["servers"]}[rollout.address] == "leaving"
        for _ in range(3):
            found = told(chat(gateway, base, "hi"))["choices"][0]["message"]["content"]
            assert found == "from the other"
        gate.open()
        assert [call.result(240).status_code for call in calls] == [200, 200]
        assert len(gateway.steps(uid_of(base))) == 9


@pytest.mark.parametrize(
    "body", [b"", b"{", {}, {"address": 7}, {"address": "host:1"}, {"address": "ftp://x"}, {"address": ""}]
)
def test_an_address_that_is_none_is_refused(front: Running, body: Any) -> None:
    assert front.post("/servers", body).status_code == 400
    assert len(told(front.get("/servers"))["servers"]) == 1


def test_removing_a_server_that_is_not_there_is_refused(front: Running) -> None:
    answer = front.http.request("DELETE", "/servers", json={"address": "http://127.0.0.1:1"})
    assert answer.status_code == 404
    assert "127.0.0.1:1" in answer.json()["detail"]
