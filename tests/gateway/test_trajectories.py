"""A trajectory's life over HTTP: begun or registered, called, paid, completed; and what is refused of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tests.gateway.kit import Running, told
from tests.gateway.rollout import Rollout, Say, chat, error_of, in_front, uid_of, user
from tests.pool.servers import serving

from headrace import DataPool, connect

UIDS = ["a/b", "50%", "%2F", "50%25", "größe 日本", "with space", "...", "a?b#c", "ö/ü%/ ", "+", "🙂", "a" * 512]


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder) as found:
        yield found


def detail_of(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    found: str = answer.json()["detail"]
    return found


# -- init --------------------------------------------------------------------------------------------------------------


def test_without_a_body_a_trajectory_is_a_group_of_its_own(gateway: Running) -> None:
    first, second = told(gateway.post("/init_trajectory")), told(gateway.post("/init_trajectory", b""))
    assert set(first) == {"trajectory_uid", "prompt_uid", "base_url"}
    assert first["prompt_uid"] == first["trajectory_uid"] != second["trajectory_uid"]
    assert first["base_url"] == f"{gateway.address}/{first['trajectory_uid']}/{first['prompt_uid']}"
    found = gateway.pool.trajectory(first["trajectory_uid"])
    assert (found.channel, found.prompt_uid, found.complete, len(found)) == ("train", found.uid, False, 0)


def test_everything_that_init_is_told_is_kept(gateway: Running) -> None:
    given = {"prompt_uid": "p1", "channel": "val", "metadata": {"answer": {"is": [42]}}, "n_rollouts": 3}
    made = gateway.init(**given, trajectory_uid="told-all")
    assert (made["trajectory_uid"], made["prompt_uid"]) == ("told-all", "p1")
    found = gateway.pool.trajectory("told-all")
    assert (found.prompt_uid, found.channel, found.metadata, found.n_rollouts) == tuple(given.values())


@pytest.mark.parametrize("uid", UIDS)
def test_a_uid_may_hold_whatever_a_url_can_encode(gateway: Running, rollout: Rollout, uid: str) -> None:
    prompt = f"{uid[:400]}/p%"
    made = gateway.init(trajectory_uid=uid, prompt_uid=prompt)
    assert made["base_url"] == f"{gateway.address}/{quote(uid, safe='')}/{quote(prompt, safe='')}"
    told(chat(gateway, made["base_url"], "hi"))
    (step,) = gateway.steps(uid)
    assert (step.trajectory_uid, step.prompt_uid) == (uid, prompt)
    assert told(gateway.get(f"/trajectories/{quote(uid, safe='')}"))["trajectory_uid"] == uid
    assert told(gateway.post(f"/complete_trajectory/{quote(uid, safe='')}"))["steps"] == 1


@pytest.mark.parametrize(
    "uid", ["", "x" * 513, ".", "..", "v1", "health", "pool", "init_trajectory", "docs", "openapi.json"]
)
def test_a_uid_that_is_empty_too_long_or_a_route_is_refused(gateway: Running, uid: str) -> None:
    assert "trajectory_uid" in detail_of(gateway.post("/init_trajectory", {"trajectory_uid": uid}), 400)


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"[]", b"null", b'"x"', b"\xff", b'{"channel": "\xff"}'),
        {"trajectory_uid": 7},
        b'{"trajectory_uid": "\\ud800"}',
        {"prompt_uid": ""},
        b'{"metadata": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        {"metadata": []},
        {"n_rollouts": 0},
        {"n_rollouts": -1},
        {"n_rollouts": 1.5},
        {"n_rollouts": True},
        {"channel": 1},
        {"chanel": "train"},
    ],
)
def test_a_wrong_init_is_refused_and_makes_nothing(gateway: Running, body: Any) -> None:
    before = gateway.pool.stats()
    assert detail_of(gateway.post("/init_trajectory", body), 400)
    after = gateway.pool.stats()
    for channel in after["channels"]:
        was = before["channels"].get(channel, {}).get("trajectories", 0)
        assert after["channels"][channel]["trajectories"] == was


def test_metadata_nested_deep_is_shown_as_it_was_given(gateway: Running) -> None:
    def init(levels: int) -> httpx.Response:
        deep = "[" * levels + "]" * levels
        body = f'{{"trajectory_uid": "deep", "metadata": {{"a": {deep}}}}}'
        return gateway.post("/init_trajectory", body.encode())

    refused = init(700)
    assert refused.status_code == 400
    assert "metadata nests deeper than 100 levels" in refused.json()["detail"]
    told(init(90))
    assert "[" * 90 + "]" * 90 in gateway.get("/trajectories/deep").text.replace(" ", "")


def test_the_same_uid_again_is_the_same_trajectory(gateway: Running, rollout: Rollout) -> None:
    first = gateway.init(trajectory_uid="again", prompt_uid="g", metadata={"a": 1})
    told(chat(gateway, first["base_url"], "hi"))
    assert gateway.init(trajectory_uid="again", prompt_uid="g", metadata={"b": 2}) == first
    found = gateway.pool.trajectory("again")
    assert (found.metadata, len(found)) == ({"a": 1, "b": 2}, 1)


@pytest.mark.parametrize("host", ["trainer.example:8100", "10.1.2.3", "localhost:99", "[::1]:8100"])
def test_the_base_url_has_the_host_that_the_caller_reached(gateway: Running, host: str) -> None:
    made = told(gateway.post("/init_trajectory", headers={"host": host}))
    assert made["base_url"].startswith(f"http://{host}/")


@pytest.mark.parametrize("host", ["0.0.0.0:8100", "0.0.0.0", "[::]:8100", "[::]"])
def test_the_base_url_of_a_caller_that_named_every_address_has_the_one_that_it_reached(
    gateway: Running, host: str
) -> None:
    made = told(gateway.post("/init_trajectory", headers={"host": host}))
    assert made["base_url"].startswith(f"{gateway.address}/")


# -- register ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_every_black_box_route_answers_with_and_without_v1(gateway: Running, rollout: Rollout, prefix: str) -> None:
    base = f"{gateway.address}/both{prefix.strip('/')}/p{prefix}"
    assert told(gateway.post(f"{base}/register_trajectory")) == {"status": "ok"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert told(gateway.post(f"{base}/chat/completions", body))["object"] == "chat.completion"
    assert told(gateway.post(f"{base}/completions", {"prompt": "x"}))["object"] == "text_completion"
    assert told(gateway.get(f"{base}/models"))["data"][0]["id"] == "scripted"
    assert told(gateway.post(f"{base}/reward", {"reward": 1})) == {"status": "ok"}
    assert told(gateway.post(f"{base}/complete_trajectory")) == {"status": "ok", "steps": 2}


def test_register_creates_what_is_not_there_under_the_group_of_its_url(gateway: Running) -> None:
    told(gateway.post("/mine/group7/v1/register_trajectory", {"channel": "val", "metadata": {"a": 1}, "n_rollouts": 2}))
    found = gateway.pool.trajectory("mine")
    assert (found.prompt_uid, found.channel, found.metadata, found.n_rollouts) == ("group7", "val", {"a": 1}, 2)


def test_before_its_first_step_a_trajectory_may_move(gateway: Running, rollout: Rollout) -> None:
    made = gateway.init(prompt_uid="here", metadata={"a": 1})
    uid = made["trajectory_uid"]
    told(gateway.post(f"/{uid}/there/v1/register_trajectory", {"channel": "val"}))
    found = gateway.pool.trajectory(uid)
    assert (found.prompt_uid, found.channel, found.metadata) == ("there", "val", {"a": 1})
    told(chat(gateway, f"{gateway.address}/{uid}/there", "hi"))
    found = gateway.pool.trajectory(uid)
    assert (found.prompt_uid, found.channel, len(found)) == ("there", "val", 1)
    assert "there" in error_of(chat(gateway, made["base_url"], "hi"), 404)["message"]


def test_once_it_has_a_step_it_stays_where_it_is(gateway: Running, rollout: Rollout, base: str) -> None:
    told(chat(gateway, base, "hi"))
    uid = uid_of(base)
    assert detail_of(gateway.post(f"/{uid}/elsewhere/v1/register_trajectory"), 409)
    assert detail_of(gateway.post(f"{base}/v1/register_trajectory", {"channel": "val"}), 409)
    found = gateway.pool.trajectory(uid)
    assert (found.prompt_uid, found.channel) == (uid, "train")
    told(chat(gateway, base, "still here"))


def test_registering_again_adds_metadata_and_keeps_the_channel(gateway: Running, rollout: Rollout) -> None:
    base = f"{gateway.address}/adds/p"
    told(gateway.post(f"{base}/v1/register_trajectory", {"channel": "val", "metadata": {"a": 1}}))
    told(chat(gateway, base, "hi"))
    told(gateway.post(f"{base}/v1/register_trajectory", {"metadata": {"b": 2}}))
    found = gateway.pool.trajectory("adds")
    assert (found.channel, found.metadata) == ("val", {"a": 1, "b": 2})


@pytest.mark.parametrize("uid", ["health", "pool", "v1"])
def test_a_route_is_no_trajectory(gateway: Running, uid: str) -> None:
    assert gateway.post(f"/{uid}/p/v1/register_trajectory").status_code in (400, 404)


def test_a_path_that_is_no_utf8_is_refused(gateway: Running) -> None:
    assert "UTF-8" in detail_of(gateway.post("/%ff/p/v1/register_trajectory"), 400)
    assert "UTF-8" in error_of(gateway.post("/%ff/p/v1/chat/completions", {}), 400)["message"]


def test_begun_again_under_another_group_it_is_found_there(gateway: Running, rollout: Rollout) -> None:
    told(gateway.post("/moves/here/v1/register_trajectory"))
    made = gateway.init(trajectory_uid="moves", prompt_uid="there")
    told(chat(gateway, made["base_url"], "hi"))
    assert gateway.pool.trajectory("moves").prompt_uid == "there"
    error_of(chat(gateway, f"{gateway.address}/moves/here", "hi"), 404)


def test_a_call_under_way_goes_with_the_trajectory_that_moves(gateway: Running, rollout: Rollout) -> None:
    made = gateway.init()
    uid = made["trajectory_uid"]
    gate = rollout.gate()
    rollout.script.append(Say(at=gate))
    with ThreadPoolExecutor(1) as threads:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        url = f"{made['base_url']}/v1/chat/completions"
        call = threads.submit(httpx.post, url, json=body, timeout=240, trust_env=False)
        gate.reached()
        told(gateway.post(f"/{uid}/moved/v1/register_trajectory", {"channel": "moved"}))
        gate.open()
        assert call.result(240).status_code == 200
    found = gateway.pool.trajectory(uid)
    assert (found.prompt_uid, found.channel, len(found)) == ("moved", "moved", 1)


# -- unknown and complete ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_a_call_for_a_trajectory_that_nobody_announced_is_404(gateway: Running, rollout: Rollout, route: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}
    body.pop("messages" if route == "completions" else "prompt")
    found = error_of(gateway.post(f"/nobody/p/v1/{route}", body), 404)
    assert (found["code"], found["type"]) == ("unknown_trajectory", "not_found_error")
    assert "register_trajectory" in found["message"]
    assert rollout.orders == []


def test_with_open_an_unknown_one_begins(folder: Path, rollout: Rollout) -> None:
    with in_front(rollout, folder, open=True) as gateway:
        told(chat(gateway, f"{gateway.address}/nobody/p", "hi"))
        found = gateway.pool.trajectory("nobody")
        assert (found.prompt_uid, found.channel, len(found)) == ("p", "train", 1)
        gateway.complete("nobody")
        error_of(chat(gateway, f"{gateway.address}/nobody/p", "hi"), 409)


def test_with_open_a_call_that_is_not_recorded_begins_nothing(folder: Path, rollout: Rollout) -> None:
    asked = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    with in_front(rollout, folder, open=True) as gateway:
        assert gateway.post("/nobody/p/v1/messages/count_tokens", asked).json()["input_tokens"] > 0
        told(gateway.post("/nobody/p/v1/chat/completions", asked, headers={"x-headrace-record": "off"}))
        assert detail_of(gateway.get("/trajectories/nobody"), 404)


def test_what_is_not_recorded_goes_on_from_answers_that_a_pool_elsewhere_does_not_know(
    folder: Path, rollout: Rollout
) -> None:
    messages = [user("hi"), {"role": "assistant", "content": "an answer of elsewhere"}, user("more")]
    asked, off = {"model": "m", "max_tokens": 4, "messages": messages}, {"x-headrace-record": "off"}
    with (
        DataPool() as kept,
        serving(kept) as address,
        connect(address) as pool,
        in_front(rollout, folder, pool, open=True) as gateway,
    ):
        for base in ("", "/nobody/p"):
            assert told(gateway.post(f"{base}/v1/messages/count_tokens", asked))["input_tokens"] > 0
            told(gateway.post(f"{base}/v1/chat/completions", asked, headers=off))
        unknown = {"model": "m", "input": "more", "previous_response_id": "resp_elsewhere"}
        refused = error_of(gateway.post("/nobody/p/v1/responses", unknown, headers=off), 404)
        assert refused["code"] == "previous_response_not_found"
        assert detail_of(gateway.get("/trajectories/nobody"), 404)


def test_rewards_and_completions_of_unknown_ones_are_404(gateway: Running) -> None:
    assert detail_of(gateway.post("/nobody/p/v1/reward", {"reward": 1}), 404)
    assert detail_of(gateway.post("/nobody/p/v1/complete_trajectory"), 404)
    assert detail_of(gateway.post("/complete_trajectory/nobody", {"reward": 1, "channel": "val"}), 404)
    assert detail_of(gateway.get("/trajectories/nobody"), 404)


def test_after_completion_nothing_is_recorded_any_more(gateway: Running, rollout: Rollout, base: str) -> None:
    told(chat(gateway, base, "hi"))
    gateway.complete(uid_of(base))
    asked = len(rollout.orders)
    found = error_of(chat(gateway, base, "more"), 409)
    assert (found["code"], found["type"]) == ("trajectory_complete", "conflict_error")
    assert detail_of(gateway.post(f"{base}/v1/register_trajectory"), 409)
    assert len(rollout.orders) == asked
    assert len(gateway.steps(uid_of(base))) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_ends_after_the_completion_is_answered_and_late(
    gateway: Running, rollout: Rollout, stream: bool
) -> None:
    channel = f"late-{stream}"
    base = gateway.init(channel=channel)["base_url"]
    told(chat(gateway, base, "hi"))
    gate = rollout.gate()
    rollout.script.append(Say(at=gate))
    with ThreadPoolExecutor(1) as threads:
        body = {"messages": [{"role": "user", "content": "more"}], "stream": stream}
        call = threads.submit(httpx.post, f"{base}/v1/chat/completions", json=body, timeout=240, trust_env=False)
        gate.reached()
        assert gateway.complete(uid_of(base), reward=1.0) == {"status": "ok", "steps": 1}
        gate.open()
        assert call.result(240).status_code == 200
    assert len(gateway.steps(uid_of(base))) == 1
    assert gateway.counted("late") == {**gateway.counted("late"), channel: 1}


def test_a_consumed_trajectory_does_not_begin_again_at_zero(gateway: Running, rollout: Rollout, base: str) -> None:
    told(chat(gateway, base, "hi"))
    uid = uid_of(base)
    gateway.complete(uid, reward=1.0)
    batch = gateway.pool.fetch_batch(1, timeout=60)
    while batch is not None and uid not in [t.uid for group in batch.groups for t in group.trajectories]:
        batch = gateway.pool.fetch_batch(1, timeout=0)
    assert batch is not None
    error_of(chat(gateway, base, "more"), 409)
    assert detail_of(gateway.post(f"{base}/v1/register_trajectory"), 409)
    assert detail_of(gateway.post("/init_trajectory", {"trajectory_uid": uid}), 409)
    assert told(gateway.post(f"{base}/v1/complete_trajectory"))["status"] == "late"


# -- rewards and completion --------------------------------------------------------------------------------------------


def test_a_completion_without_a_body_keeps_the_channel_and_counts_its_steps(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init(channel="val")["base_url"]
    for text in ("a", "b", "c"):
        told(chat(gateway, base, text))
    assert told(gateway.post(f"{base}/v1/complete_trajectory")) == {"status": "ok", "steps": 3}
    found = gateway.pool.trajectory(uid_of(base))
    assert (found.channel, found.complete, [s.is_last for s in found.steps]) == ("val", True, [False, False, True])
    assert [step.step_index for step in found.steps] == [0, 1, 2]


def test_a_completion_with_a_body_keeps_the_registered_channel_and_its_reward(
    gateway: Running, rollout: Rollout, base: str
) -> None:
    told(gateway.post(f"{base}/v1/register_trajectory", {"channel": "val"}))
    told(chat(gateway, base, "a"))
    told(chat(gateway, base, "b"))
    assert told(gateway.post(f"{base}/v1/complete_trajectory", {"reward": 0.25})) == {"status": "ok", "steps": 2}
    found = gateway.pool.trajectory(uid_of(base))
    assert (found.channel, [step.reward for step in found.steps]) == ("val", [None, 0.25])


def test_a_completion_for_another_channel_is_409_and_completes_nothing(
    gateway: Running, rollout: Rollout, base: str
) -> None:
    told(chat(gateway, base, "hi"))
    uid = uid_of(base)
    for path in (f"{base}/v1/complete_trajectory", f"/complete_trajectory/{uid}"):
        assert "val" in detail_of(gateway.post(path, {"reward": 1, "channel": "val"}), 409)
    found = gateway.pool.trajectory(uid)
    assert (found.complete, found.reward) == (False, None)
    assert gateway.complete(uid, channel="train", reward=1) == {"status": "ok", "steps": 1}


def test_a_trajectory_without_a_call_may_be_completed(gateway: Running, base: str) -> None:
    assert gateway.complete(uid_of(base), reward=0.5)["steps"] == 0


def test_completing_twice_is_the_same_as_once(gateway: Running, rollout: Rollout, base: str) -> None:
    told(chat(gateway, base, "hi"))
    uid = uid_of(base)
    assert gateway.complete(uid, reward=1) == gateway.complete(uid) == {"status": "ok", "steps": 1}
    found = gateway.pool.trajectory(uid)
    assert (len(found), found.reward) == (1, 1.0)


def test_a_reward_is_of_a_step_or_of_the_last(gateway: Running, rollout: Rollout, base: str) -> None:
    for text in ("a", "b", "c"):
        told(chat(gateway, base, text))
    told(gateway.post(f"{base}/v1/reward", {"reward": -1, "step_index": 0}))
    told(gateway.post(f"{base}/v1/reward", {"reward": 0.5}))
    assert [step.reward for step in gateway.steps(uid_of(base))] == [-1.0, None, 0.5]


def test_a_late_reward_counts_until_the_group_is_consumed(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init(channel="late", prompt_uid="late", n_rollouts=1)["base_url"]
    told(chat(gateway, base, "hi"))
    told(gateway.post(f"{base}/v1/complete_trajectory"))
    assert told(gateway.post(f"{base}/v1/reward", {"reward": 2})) == {"status": "ok"}
    batch = gateway.pool.fetch_batch(1, channel="late", timeout=60)
    assert batch is not None
    assert [group.rewards for group in batch.groups] == [[2.0]]
    assert told(gateway.post(f"{base}/v1/reward", {"reward": 3}))["status"] == "late"


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'{"reward": NaN}', b'{"reward": 1e999}', b'{"reward": Infinity}'),
        *({}, {"reward": None}, {"reward": "1"}, {"reward": True}, {"reward": 1, "step_index": -1}),
        *({"reward": 1, "step_index": 1.5}, {"reward": 1, "stepindex": 0}),
    ],
)
def test_a_wrong_reward_is_refused_and_changes_nothing(
    gateway: Running, rollout: Rollout, base: str, body: Any
) -> None:
    told(chat(gateway, base, "hi"))
    assert detail_of(gateway.post(f"{base}/v1/reward", body), 400)
    assert [step.reward for step in gateway.steps(uid_of(base))] == [None]


def test_a_reward_for_a_step_that_is_not_there_is_404(gateway: Running, rollout: Rollout, base: str) -> None:
    assert detail_of(gateway.post(f"{base}/v1/reward", {"reward": 1}), 404)
    told(chat(gateway, base, "hi"))
    assert detail_of(gateway.post(f"{base}/v1/reward", {"reward": 1, "step_index": 7}), 404)


@pytest.mark.parametrize("body", [b"{", b"[]", {"reward": "x"}, b'{"reward": NaN}', {"channel": 3}, {"rewards": 1}])
def test_a_wrong_completion_is_refused_and_completes_nothing(gateway: Running, base: str, body: Any) -> None:
    assert detail_of(gateway.post(f"{base}/v1/complete_trajectory", body), 400)
    assert not gateway.pool.trajectory(uid_of(base)).complete


# -- looking in --------------------------------------------------------------------------------------------------------


def test_a_trajectory_is_shown_with_whole_prompts(gateway: Running, rollout: Rollout) -> None:
    made = gateway.init(metadata={"truth": 7})
    base = made["base_url"]
    first = told(chat(gateway, base, "hi"))["choices"][0]["message"]
    told(chat(gateway, base, [{"role": "user", "content": "hi"}, first, {"role": "user", "content": "more"}]))
    shown = told(gateway.get(f"/trajectories/{made['trajectory_uid']}"))
    assert (shown["trajectory_uid"], shown["prompt_uid"]) == (made["trajectory_uid"], made["prompt_uid"])
    assert (shown["channel"], shown["complete"]) == ("train", False)
    assert [step["prompt_ids"] for step in shown["steps"]] == [order["prompt"] for order in rollout.orders]
    assert [step["step_index"] for step in shown["steps"]] == [0, 1]


def test_a_route_that_is_not_there_is_said_in_the_shape_its_caller_reads(gateway: Running) -> None:
    assert "/v1/embeddings" in error_of(gateway.post("/t/p/v1/embeddings", {}), 404)["message"]
    assert error_of(gateway.get("/t/p/v1/chat/completions"), 405)["code"] == "method_not_allowed"
    assert "detail" in gateway.get("/nothing").json()
    assert gateway.get("/init_trajectory").status_code == 405
