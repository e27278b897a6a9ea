"""Flows that handle tokens themselves: sampling by ids or messages, and handing their own steps in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.kit import Running, told
from tests.gateway.rollout import Rollout, Say, answers, chat, error_of, in_front, log_probs_of, user
from tests.tokens import models
from tests.tokens.kit import LOOK_UP, STOPS

from headrace.tokens import load_renderer, read_messages

FIELDS = {"prompt_ids", "response_ids", "token_ids", "log_probs", "response_text", "stop_reason", "policy_version"}


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder, prompt_length=512, response_length=64) as found:
        yield found


def step(uid: str, index: int | None = None, **fields: Any) -> dict[str, Any]:
    given = {
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5],
        "rollout_log_probs": [-0.5, -0.25],
        "trajectory_uid": uid,
        "prompt_uid": f"{uid}-p",
        "policy_version": 0,
        "is_last": False,
    }
    return {**given, **({} if index is None else {"step_index": index}), **fields}


# -- generate ----------------------------------------------------------------------------------------------------------


def test_ids_in_ids_and_log_probs_out(gateway: Running, rollout: Rollout) -> None:
    rollout.script.append("hello")
    body = {"prompt_ids": [5, 6, 7], "sampling_params": {"temperature": 0.7, "max_tokens": 20, "top_k": 5, "seed": 3}}
    found = told(gateway.post("/generate", body))
    assert set(found) >= FIELDS
    ids = [*rollout.vocabulary.encode("hello"), rollout.end]
    assert found["prompt_ids"] == [5, 6, 7]
    assert found["response_ids"] == found["token_ids"] == ids
    assert found["log_probs"] == log_probs_of(ids)
    assert (found["stop_reason"], found["policy_version"]) == ("stop", 0)
    assert found["response_text"].startswith("hello")
    assert found["sampling"].items() >= body["sampling_params"].items()
    assert found["logprobs_mode"] == gateway.get("/servers").json()["servers"][0]["log_prob_mode"]
    (order,) = rollout.orders
    assert order["prompt"] == [5, 6, 7]
    assert {name: order[name] for name in ("temperature", "max_tokens", "top_k", "seed", "top_p")} == {
        "temperature": 0.7,
        "max_tokens": 20,
        "top_k": 5,
        "seed": 3,
        "top_p": 1.0,
    }


def test_messages_are_rendered_as_the_template_would(gateway: Running, rollout: Rollout, folder: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("größer 🙂?")]
    body = {"messages": messages, "tools": [LOOK_UP], "max_tokens": 9, "temperature": 0.5, "top_p": 0.9}
    found = told(gateway.post("/generate", body))
    rendered = load_renderer(folder).render(read_messages(messages), [LOOK_UP])
    assert found["prompt_ids"] == rollout.orders[0]["prompt"] == list(rendered)
    sent = {name: rollout.orders[0][name] for name in ("max_tokens", "temperature", "top_p")}
    assert sent == {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9}


def test_generating_records_nothing(gateway: Running, rollout: Rollout) -> None:
    before = gateway.pool.stats()["channels"].get("train", {}).get("trajectories", 0)
    told(gateway.post("/generate", {"prompt_ids": [5], "trajectory_uid": "white", "prompt_uid": "p"}))
    assert gateway.pool.stats()["channels"].get("train", {}).get("trajectories", 0) == before


def test_the_lengths_hold_here_too(gateway: Running, rollout: Rollout) -> None:
    refused = gateway.post("/generate", {"prompt_ids": [5] * 513})
    assert refused.status_code == 400
    assert refused.json()["code"] == "context_length_exceeded"
    told(gateway.post("/generate", {"prompt_ids": [5] * 512, "sampling_params": {"max_tokens": 1000}}))
    assert rollout.orders[0]["max_tokens"] == 64


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", {}),
        {"prompt_ids": []},
        {"prompt_ids": "abc"},
        {"prompt_ids": [1.5]},
        {"prompt_ids": [-1]},
        {"prompt_ids": [True]},
        {"prompt_ids": [10**6]},
        {"prompt_ids": [2**40]},
        {"prompt_ids": [1], "messages": [user("x")]},
        {"messages": []},
        {"messages": [7]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [user("x")], "tools": [7]},
        {"messages": [user("x")], "tools": "x"},
        {"prompt_ids": [1], "sampling_params": []},
        {"prompt_ids": [1], "sampling_params": {"temperature": -1}},
        {"prompt_ids": [1], "sampling_params": {"max_tokens": 0}},
        {"prompt_ids": [1], "sampling_params": {"n": 2}},
        {"prompt_ids": [1], "max_tokens": -1},
        {"prompt_ids": [1], "temperature": "x"},
        {"prompt_id": [1]},
    ],
    ids=lambda body: str(body)[:50],
)
def test_a_wrong_generate_is_400_and_asks_nothing(gateway: Running, rollout: Rollout, body: Any) -> None:
    refused = gateway.post("/generate", body)
    assert refused.status_code == 400, refused.text
    assert refused.json()["detail"]
    assert rollout.orders == []


@pytest.mark.parametrize("tool", [None, 7, "add"])
def test_a_tool_that_is_none_is_named_whoever_writes_the_prompt(tool: Any) -> None:
    """A family's library would not say what is wrong with it, as a template's errors do."""
    with (
        Rollout(models.vocabulary("qwen3"), STOPS["qwen3"]) as rollout,
        in_front(rollout, models.folder("qwen3")) as gateway,
    ):
        refused = gateway.post("/generate", {"messages": [user("x")], "tools": [LOOK_UP, tool]})
        assert refused.status_code == 400, refused.text
        assert "tools[1]" in refused.json()["detail"]


def test_a_server_that_fails_is_said_in_detail(gateway: Running, rollout: Rollout) -> None:
    rollout.script.append(answers(200, b"nonsense"))
    refused = gateway.post("/generate", {"prompt_ids": [5]})
    assert refused.status_code == 502
    assert rollout.address in refused.json()["detail"]


@pytest.mark.parametrize("wrong", [[-0.5], [None, -0.5, -0.5]])
def test_log_probs_that_are_wrong_are_not_handed_on_as_right(gateway: Running, rollout: Rollout, wrong: Any) -> None:
    """Whoever samples here trains on it: one log-prob a token, each a number, or an error."""
    rollout.script.append(Say(ids=[40, 41], log_probs=wrong))
    answer = gateway.post("/generate", {"prompt_ids": [5]})
    assert answer.status_code == 502, answer.text


# -- submit_steps ------------------------------------------------------------------------------------------------------


def test_steps_are_taken_once_however_often_they_are_sent(gateway: Running) -> None:
    steps = [step("once", 0), step("once", 1, is_last=True, reward=1.0)]
    assert told(gateway.post("/submit_steps", {"steps": steps})) == {"accepted": 2}
    again = told(gateway.post("/submit_steps", {"steps": steps}))
    assert again == {"accepted": 0, "duplicates": 2}
    found = gateway.pool.trajectory("once")
    assert (found.prompt_uid, found.channel, found.complete, found.reward) == ("once-p", "train", True, 1.0)
    first = found.steps[0]
    assert first.rollout_log_probs is not None
    assert (first.prompt_ids.tolist(), first.response_ids.tolist()) == ([1, 2, 3], [4, 5])
    assert first.rollout_log_probs.tolist() == [-0.5, -0.25]


def test_a_trajectory_that_its_steps_end_takes_no_more_calls(gateway: Running, rollout: Rollout) -> None:
    begun = gateway.init()
    told(chat(gateway, begun["base_url"], "hi"))
    uid, prompt = begun["trajectory_uid"], begun["prompt_uid"]
    last = step(uid, 1, prompt_uid=prompt, is_last=True, reward=1.0)
    assert told(gateway.post("/submit_steps", {"steps": [last]})) == {"accepted": 1}
    before = len(rollout.orders)
    assert error_of(chat(gateway, begun["base_url"], "more"), 409)["code"] == "trajectory_complete"
    assert len(rollout.orders) == before


def test_the_channel_is_in_the_query(gateway: Running) -> None:
    told(gateway.post("/submit_steps?channel=val", {"steps": [step("there", 0)]}))
    assert gateway.pool.trajectory("there").channel == "val"


def test_everything_of_a_step_is_kept(gateway: Running) -> None:
    given = step(
        "kept",
        0,
        reward=0.5,
        policy_version=7,
        is_last=True,
        metadata={"a": [1, None]},
        multi_modal_data={"image": "x"},
        routed_experts=[[[1, 2]], [[3, 4]]],
    )
    told(gateway.post("/submit_steps", {"steps": [given]}))
    (found,) = gateway.steps("kept")
    assert (found.reward, found.policy_version, found.is_last) == (0.5, 7, True)
    assert (found.metadata, found.multi_modal_data) == ({"a": [1, None]}, {"image": "x"})
    assert found.routed_experts.tolist() == [[[1, 2]], [[3, 4]]]


def test_no_steps_are_no_steps(gateway: Running) -> None:
    assert told(gateway.post("/submit_steps", {"steps": []})) == {"accepted": 0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_ids": []},
        {"response_ids": []},
        {"prompt_ids": [-1]},
        {"prompt_ids": [2**33]},
        {"prompt_ids": ["x"]},
        {"rollout_log_probs": [-0.5]},
        {"rollout_log_probs": "x"},
        {"trajectory_uid": ""},
        {"trajectory_uid": 7},
        {"step_index": -1},
        {"policy_version": -1},
        {"reward": "x"},
        {"metadata": 7},
        {"routed_experts": "x"},
        {"version_spans": [[3, 1]]},
        {"is_last": "yes"},
        {"unknown": 1},
    ],
    ids=str,
)
def test_one_wrong_step_takes_none(gateway: Running, wrong: dict[str, Any]) -> None:
    uid = f"none-{next(iter(wrong))}"
    refused = gateway.post("/submit_steps", {"steps": [step(uid, 0), {**step(uid, 1), **wrong}]})
    assert refused.status_code == 400, refused.text
    assert refused.json()["detail"]
    assert gateway.get(f"/trajectories/{uid}").status_code == 404


def test_another_step_of_the_same_index_is_a_conflict(gateway: Running) -> None:
    told(gateway.post("/submit_steps", {"steps": [step("same", 0)]}))
    refused = gateway.post("/submit_steps", {"steps": [step("same", 0, response_ids=[9, 9])]})
    assert refused.status_code == 409
    assert gateway.steps("same")[0].response_ids.tolist() == [4, 5]


def test_a_trajectory_is_of_one_channel_whoever_adds_to_it(gateway: Running, rollout: Rollout) -> None:
    """Two trajectories of one name in two channels could not be told apart by their routes."""
    made = gateway.init(trajectory_uid="one-channel")
    body = {"model": "m", "messages": [user("hi")]}
    told(gateway.post(f"{made['base_url']}/v1/chat/completions", body))
    refused = gateway.post("/init_trajectory", {"trajectory_uid": "one-channel", "channel": "val"})
    assert refused.status_code == 409, refused.text
    assert gateway.pool.trajectory("one-channel").channel == "train"


# -- compute_reward ----------------------------------------------------------------------------------------------------


def test_without_a_reward_worker_a_reward_is_503_that_says_so(gateway: Running) -> None:
    for body in (
        {"prompt_ids": [1], "response_ids": [2], "dataset_fields": {"truth": "7"}, "num_turns": 1},
        {"trajectory_uid": "t", "messages": [user("x")]},
    ):
        refused = gateway.post("/compute_reward", body)
        assert refused.status_code == 503
        assert "reward worker" in refused.json()["detail"]
    assert gateway.post("/compute_reward", b"{").status_code == 400
