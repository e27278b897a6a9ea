"""Several recorded models behind one gateway: each its own servers, tokenizer, channel and versions; one trajectory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.kit import Running, tokens, told
from tests.gateway.models.kit import with_models
from tests.gateway.rollout import Rollout, answers, chat, content_of, error_of, in_front, scripted, user
from tests.tokens import models as tokenizers

from headrace import DataPool

Json = dict[str, Any]


@pytest.fixture(scope="module")
def second() -> Iterator[Rollout]:
    """A server whose model has another tokenizer."""
    with scripted(tokenizers.folder("smollm2")) as found:
        yield found


@pytest.fixture
def other(second: Rollout) -> Rollout:
    second.forget()
    return second


def policies(other: Rollout) -> Json:
    smol = {"addresses": other.address, "tokenizer": str(tokenizers.folder("smollm2"))}
    return {"smol": smol, "teacher": {**smol, "mode": "record"}}


@pytest.fixture
def gateway(rollout: Rollout, other: Rollout, folder: Path, tmp_path: Path, pool: DataPool) -> Iterator[Running]:
    with with_models(pool, rollout.address, folder, tmp_path / "models.json", policies(other)) as found:
        yield found


def talk(gateway: Running, base: str, model: str, turns: int) -> list[Json]:
    """A conversation with one model, of which each turn continues the last."""
    said: list[Json] = []
    for turn in range(turns):
        said.append(user(f"{model} {turn}"))
        said.append(told(chat(gateway, base, said, model=model))["choices"][0]["message"])
    return said


def test_two_models_of_one_agent_keep_their_tokens_in_trees_of_their_own(
    gateway: Running, rollout: Rollout, other: Rollout, pool: DataPool
) -> None:
    begun = gateway.init(metadata={"truth": 1}, n_rollouts=1)
    uid, base = begun["trajectory_uid"], begun["base_url"]
    said: dict[str, list[Json]] = {"policy": [], "smol": []}
    for turn in range(3):
        for model, conversation in said.items():
            conversation.append(user(f"{model} {turn}"))
            answer = told(chat(gateway, base, conversation, model=model))
            assert answer["model"] == model
            conversation.append(answer["choices"][0]["message"])
    for server, held in ((rollout, uid), (other, f"{uid}@smol")):
        steps = gateway.steps(held)
        assert [step.prompt_ids.tolist() for step in steps] == [order["prompt"] for order in server.orders]
        for before, after in pairwise(steps):
            assert after.prompt_ids.tolist()[: len(tokens(before))] == tokens(before)
    beside = pool.trajectory(f"{uid}@smol")
    assert (beside.prompt_uid, beside.channel, beside.metadata, beside.n_rollouts) == (
        *(begun["prompt_uid"], "train@smol", {"truth": 1}),
        1,
    )
    assert gateway.complete(uid, reward=2.5) == {"status": "ok", "steps": 6}
    for channel in ("train", "train@smol"):
        (group,) = pool.fetch_batch(1, channel=channel).groups
        (trajectory,) = group.trajectories
        assert (len(trajectory), trajectory.reward) == (3, 2.5)


def test_a_recorded_models_steps_are_in_no_batch_and_can_be_read(
    gateway: Running, other: Rollout, pool: DataPool
) -> None:
    begun = gateway.init()
    uid, base = begun["trajectory_uid"], begun["base_url"]
    talk(gateway, base, "teacher", 2)
    talk(gateway, base, "policy", 1)
    gateway.complete(uid, reward=1)
    (group,) = pool.fetch_batch(1).groups
    assert [trajectory.uid for trajectory in group.trajectories] == [uid]
    for unit in ("group", "step"):
        assert pool.fetch_batch(1, channel="train@teacher", unit=unit, timeout=0) is None
    pool.shutdown()
    for unit in ("group", "step"):
        assert pool.fetch_batch(1, channel="train@teacher", unit=unit) is None
    shown = told(gateway.get(f"/trajectories/{uid}@teacher"))
    assert [step["prompt_ids"] for step in shown["steps"]] == [order["prompt"] for order in other.orders]
    assert {step["quarantined"] for step in shown["steps"]} == {"record_only"}
    assert shown["steps"][-1]["reward"] == 1


@pytest.mark.parametrize("model", ["smol", "teacher"])
def test_another_process_goes_on_with_the_same_tokens(
    rollout: Rollout, other: Rollout, folder: Path, tmp_path: Path, pool: DataPool, model: str
) -> None:
    file = tmp_path / "models.json"
    with with_models(pool, rollout.address, folder, file, policies(other)) as gateway:
        begun = gateway.init()
        said = talk(gateway, begun["base_url"], model, 2)
    with with_models(pool, rollout.address, folder, file, policies(other)) as gateway:
        base = f"{gateway.address}/{begun['trajectory_uid']}/{begun['prompt_uid']}"
        told(chat(gateway, base, [*said, user("more")], model=model))
        steps = gateway.steps(f"{begun['trajectory_uid']}@{model}")
    assert len(steps) == 3
    assert steps[2].prompt_ids.tolist()[: len(tokens(steps[1]))] == tokens(steps[1])
    assert steps[2].metadata["cause"] == "extended"


def test_an_agent_that_never_calls_the_default_leaves_nothing_in_its_channel(gateway: Running, pool: DataPool) -> None:
    begun = gateway.init()
    talk(gateway, begun["base_url"], "smol", 1)
    assert gateway.complete(begun["trajectory_uid"], reward=1) == {"status": "ok", "steps": 1}
    assert len(pool.fetch_batch(1, channel="train@smol").steps) == 1
    assert pool.fetch_batch(1, timeout=0) is None
    assert error_of(chat(gateway, begun["base_url"], "hi", model="smol"), 409)["code"] == "trajectory_complete"


def test_a_call_that_fails_leaves_no_rollout_of_its_model(gateway: Running, other: Rollout, pool: DataPool) -> None:
    begun = gateway.init()
    talk(gateway, begun["base_url"], "policy", 1)
    error_of(chat(gateway, begun["base_url"], "hi", model="smol", temperature=-1), 400)
    other.script.append(answers(200, b"x"))
    error_of(chat(gateway, begun["base_url"], "hi", model="smol"), 502)
    assert gateway.complete(begun["trajectory_uid"])["steps"] == 1
    assert pool.fetch_batch(1, channel="train@smol", timeout=0) is None


def test_a_channel_that_the_trajectory_names_keeps_its_models_apart_too(gateway: Running, pool: DataPool) -> None:
    begun = gateway.init(channel="val")
    for model in ("policy", "smol"):
        talk(gateway, begun["base_url"], model, 1)
    gateway.complete(begun["trajectory_uid"])
    assert {name for name, found in pool.stats()["channels"].items() if found["trajectories"]} == {"val", "val@smol"}


def test_what_is_registered_later_holds_for_every_model(gateway: Running, pool: DataPool) -> None:
    begun = gateway.init()
    talk(gateway, begun["base_url"], "smol", 1)
    told(gateway.post(f"{begun['base_url']}/v1/register_trajectory", {"metadata": {"a": 1}, "n_rollouts": 2}))
    beside = pool.trajectory(f"{begun['trajectory_uid']}@smol")
    assert (beside.metadata, beside.n_rollouts) == ({"a": 1}, 2)


def test_a_reward_is_for_every_models_last_step_and_one_with_an_index_for_the_agents(gateway: Running) -> None:
    begun = gateway.init()
    uid, base = begun["trajectory_uid"], begun["base_url"]
    for model in ("policy", "smol"):
        talk(gateway, base, model, 2)
    told(gateway.post(f"{base}/v1/reward", {"reward": 3}))
    told(gateway.post(f"{base}/v1/reward", {"reward": 1, "step_index": 0}))
    assert [step.reward for step in gateway.steps(uid)] == [1, 3]
    assert [step.reward for step in gateway.steps(f"{uid}@smol")] == [None, 3]


def test_names_under_which_other_models_are_kept_cannot_be_called(gateway: Running) -> None:
    begun = gateway.init()
    talk(gateway, begun["base_url"], "smol", 1)
    taken = f"{begun['trajectory_uid']}@smol"
    base = f"{gateway.address}/{taken}/{begun['prompt_uid']}"
    assert error_of(chat(gateway, base, "hi"), 400)["code"] == "reserved_uid"
    assert gateway.post("/init_trajectory", {"trajectory_uid": taken}).status_code == 400
    assert gateway.post(f"/complete_trajectory/{taken}").status_code == 400
    assert len(gateway.steps(taken)) == 1


# -- versions and servers ----------------------------------------------------------------------------------------------


def test_each_model_has_its_own_version(gateway: Running, rollout: Rollout, other: Rollout, pool: DataPool) -> None:
    begun = gateway.init()
    told(gateway.post("/policy_version", {"version": 7}))
    told(gateway.post("/policy_version", {"version": 3, "model": "smol"}))
    assert told(gateway.get("/policy_version")) == {"version": 7, "servers": {rollout.address: 7}}
    assert told(gateway.get("/policy_version?model=smol")) == {"version": 3, "servers": {other.address: 3}}
    assert told(gateway.get("/policy_version?model=teacher"))["version"] == 0
    assert gateway.get("/policy_version?model=smool").status_code == 404
    for model, held, version in (("policy", "", 7), ("smol", "@smol", 3), ("teacher", "@teacher", 0)):
        answer = chat(gateway, begun["base_url"], "hi", model=model)
        assert answer.headers["x-headrace-policy-version"] == str(version)
        assert gateway.steps(begun["trajectory_uid"] + held)[0].policy_version == version
    known = {name: found["policy_version"] for name, found in pool.stats()["channels"].items()}
    assert known == {"train": 7, "train@smol": 3, "train@teacher": 0}
    assert gateway.post("/policy_version", {"version": 2, "model": "smol"}).status_code == 400
    assert told(gateway.get("/policy_version?model=smol"))["version"] == 3


def test_a_restarted_gateway_knows_each_models_version(
    rollout: Rollout, other: Rollout, folder: Path, tmp_path: Path, pool: DataPool
) -> None:
    file = tmp_path / "models.json"
    with with_models(pool, rollout.address, folder, file, policies(other)) as gateway:
        told(gateway.post("/policy_version", {"version": 7}))
        told(gateway.post("/policy_version", {"version": 3, "model": "smol"}))
    with with_models(pool, rollout.address, folder, file, policies(other)) as gateway:
        found = [told(gateway.get(f"/policy_version{query}"))["version"] for query in ("", "?model=smol")]
    assert found == [7, 3]


def test_one_model_can_be_paused_while_another_goes_on(gateway: Running, threads: Any) -> None:
    base = gateway.init()["base_url"]
    told(gateway.post("/pause?model=smol"))
    waits = threads.submit(chat, gateway, base, "hi", model="smol")
    told(chat(gateway, base, "hi", model="policy"))
    assert not waits.done()
    assert gateway.post("/pause?model=nobody").status_code == 404
    told(gateway.post("/resume?model=smol"))
    told(waits.result(240))


def test_servers_and_metrics_are_by_model(gateway: Running, rollout: Rollout, other: Rollout) -> None:
    found = told(gateway.get("/servers"))["servers"]
    assert [(server["policy"], server["address"]) for server in found] == [
        ("", rollout.address),
        ("smol", other.address),
        ("teacher", other.address),
    ]
    shown = gateway.get("/metrics").text
    assert f'headrace_gateway_server_up{{model="smol",server="{other.address}"}} 1' in shown
    assert 'headrace_gateway_policy_version{model="smol"} 0' in shown
    told(gateway.http.request("DELETE", "/servers", json={"address": other.address, "model": "smol"}))
    assert [server["policy"] for server in told(gateway.get("/servers"))["servers"]] == ["", "teacher"]


def test_models_are_listed_by_the_names_that_may_be_called(gateway: Running) -> None:
    listed = told(gateway.get(f"{gateway.init()['base_url']}/v1/models"))
    assert [card["id"] for card in listed["data"]] == ["scripted", "smol", "teacher"]


def test_an_adapter_is_asked_for_by_its_own_name(
    rollout: Rollout, folder: Path, tmp_path: Path, pool: DataPool
) -> None:
    rollout.adapters = ("my-lora",)
    models = {"tuned": {"served": "my-lora"}}
    try:
        with with_models(pool, rollout.address, folder, tmp_path / "m.json", models) as gateway:
            base = gateway.init()["base_url"]
            assert told(chat(gateway, base, "hi", model="tuned"))["model"] == "tuned"
            told(chat(gateway, base, "hi"))
        assert [order["model"] for order in rollout.orders] == ["my-lora", "scripted"]
    finally:
        rollout.adapters = ()
    with with_models(pool, rollout.address, folder, tmp_path / "m.json", models, until_ready=False) as gateway:
        error_of(chat(gateway, gateway.init()["base_url"], "hi", model="tuned"), 503)


def test_a_flow_names_the_model_that_samples(gateway: Running, rollout: Rollout, other: Rollout) -> None:
    asked = {"messages": [user("hi")], "model": "smol"}
    found = told(gateway.post("/generate", asked))
    assert (len(rollout.orders), found["prompt_ids"]) == (0, other.orders[0]["prompt"])
    assert gateway.post("/generate", {**asked, "model": "nobody"}).status_code == 404


# -- the header --------------------------------------------------------------------------------------------------------

OFF = {"x-headrace-record": "off"}


@pytest.mark.parametrize("model", ["policy", "smol"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_not_to_be_recorded_is_answered_and_leaves_nothing(
    gateway: Running, pool: DataPool, model: str, stream: bool
) -> None:
    begun = gateway.init()
    answer = chat(gateway, begun["base_url"], "hi", model=model, stream=stream, headers=OFF)
    assert answer.status_code == 200
    assert content_of(answer.text) == "ok" if stream else "ok" in answer.text
    assert {name: found["ledger"]["submitted"] for name, found in pool.stats()["channels"].items()} == {"train": 0}
    assert gateway.counted("unrecorded") == {"asked_for": 1}
    talk(gateway, begun["base_url"], model, 2)
    assert gateway.complete(begun["trajectory_uid"])["steps"] == 2


def test_the_header_is_on_or_off(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder) as gateway:
        begun = gateway.init()
        fault = error_of(chat(gateway, begun["base_url"], "hi", headers={"x-headrace-record": "no"}), 400)
        assert "'no'; it must be on or off" in fault["message"]
        told(chat(gateway, begun["base_url"], "hi", headers={"x-headrace-record": "on"}))
        assert len(gateway.steps(begun["trajectory_uid"])) == 1
