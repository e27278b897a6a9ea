"""A trajectory that failed, whom rewards are from, and a row's fields in every step, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.kit import Running, told
from tests.gateway.rollout import Rollout, Say, chat, error_of, in_front, uid_of, user

from headrace import DataPool

AGENT, REWARD, ADMIN = "agent-key", "reward-key", "admin-key"
#: Columns of a dataset with the names under which steps say something of their own.
ROW = {"text": "a question", "request": "r", "choice": "B", "kept": "k", "record": 1, "ground_truth": "the-secret"}


def bearer(key: str) -> dict[str, dict[str, str]]:
    return {"headers": {"authorization": f"Bearer {key}"}}


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder) as found:
        yield found


# -- failing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["{base}/v1/fail_trajectory", "{base}/fail_trajectory", "/fail_trajectory/{uid}"])
def test_a_failed_trajectory_is_told_and_takes_no_more_calls(gateway: Running, rollout: Rollout, route: str) -> None:
    base = gateway.init()["base_url"]
    uid = uid_of(base)
    told(chat(gateway, base, "hi"))
    path, body = route.format(base=base, uid=uid), {"reason": "crashed: exit code 3"}
    before = gateway.counted("failed").get("ok", 0)
    assert told(gateway.post(path, body)) == {"status": "ok", "steps": 1}
    assert told(gateway.post(path, body)) == {"status": "ok", "steps": 1}  # the answer was lost: the same again
    assert gateway.counted("failed")["ok"] == before + 2
    refused = error_of(chat(gateway, base, "more"), 409)
    assert "crashed: exit code 3" in refused["message"]
    assert gateway.post(f"{base}/v1/register_trajectory").status_code == 409
    assert gateway.post("/init_trajectory", {"trajectory_uid": uid}).status_code == 409
    assert told(gateway.post(f"{base}/v1/complete_trajectory", {"reward": 1}))["status"] == "late"
    (row,) = gateway.pool.list_trajectories(state="failed", trajectory_uid=uid)["items"]
    assert (row["reason"], row["steps"]) == ("crashed: exit code 3", 1)


def test_a_call_under_way_is_answered_and_its_step_is_late(gateway: Running, rollout: Rollout, threads: Any) -> None:
    base = gateway.init()["base_url"]
    gate = rollout.gate()
    rollout.script.append(Say("too late", at=gate))
    asked = threads.submit(chat, gateway, base, "hi")
    gate.reached()
    late = gateway.pool.stats("train")["ledger"]["dropped"].get("late", 0)
    assert told(gateway.post(f"{base}/v1/fail_trajectory", {"reason": "hung"})) == {"status": "ok", "steps": 0}
    gate.open()
    assert told(asked.result())["choices"]
    assert gateway.pool.stats("train")["ledger"]["dropped"]["late"] == late + 1


def test_complete_and_unknown_ones_are_said_and_stay(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init()["base_url"]
    told(chat(gateway, base, "hi"))
    gateway.complete(uid_of(base), reward=1.0)
    assert told(gateway.post(f"{base}/v1/fail_trajectory", {"reason": "x"})) == {"status": "late", "steps": 1}
    assert told(gateway.post("/fail_trajectory/nobody", {"reason": "x"})) == {"status": "unknown", "steps": 0}
    assert gateway.pool.trajectory(uid_of(base)).reward == 1.0


@pytest.mark.parametrize("body", [None, {}, {"reason": ""}, {"reason": 3}, {"reason": "x", "why": "y"}])
def test_a_failure_needs_a_reason(gateway: Running, body: Any) -> None:
    base = gateway.init()["base_url"]
    assert gateway.post(f"{base}/v1/fail_trajectory", body).status_code == 400
    assert gateway.pool.trajectory(uid_of(base)).state == "queued"


# -- whom a reward is from ---------------------------------------------------------------------------------------------


def test_a_reward_says_whom_it_is_from_and_a_persons_stays(gateway: Running, rollout: Rollout) -> None:
    base = gateway.init()["base_url"]
    told(chat(gateway, base, "hi"))
    by_model = {"reward": 0.5, "source": "model", "info": {"math": 0.5}}
    assert told(gateway.post(f"{base}/v1/reward", by_model)) == {"status": "ok"}
    assert told(gateway.post(f"{base}/v1/reward", {"reward": 1, "source": "person"})) == {"status": "ok"}
    assert told(gateway.post(f"{base}/v1/reward", by_model)) == {"status": "kept"}
    (step,) = gateway.steps(uid_of(base))
    assert (step.reward, step.metadata["reward_source"]) == (1.0, "person")
    assert "reward_extra_info" not in step.metadata
    assert gateway.post(f"{base}/v1/reward", {"reward": 1, "source": 7}).status_code == 400


def test_an_agents_key_speaks_for_no_person(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder, api_key=AGENT, reward_key=REWARD) as gateway:
        base = told(gateway.post("/init_trajectory", **bearer(AGENT)))["base_url"]
        told(chat(gateway, base, "hi", **bearer(AGENT)))
        step = {"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "t", "metadata": {"reward_source": "person"}}
        about = {"metadata": {"reward_extra_info": {}}}
        tries: list[tuple[str, dict[str, Any]]] = [
            (f"{base}/v1/reward", {"reward": 1, "source": "person"}),
            (f"{base}/v1/fail_trajectory", {"reason": "x"}),
            (f"/fail_trajectory/{uid_of(base)}", {"reason": "x"}),
            ("/submit_steps", {"steps": [step]}),
            ("/init_trajectory", about),
            (f"{base}/v1/register_trajectory", about),
        ]
        for path, body in tries:
            assert gateway.post(path, body, **bearer(AGENT)).status_code == 401, path
        for path, body in tries[3:]:
            told(gateway.post(path, body, **bearer(REWARD)))


# -- a row's fields ----------------------------------------------------------------------------------------------------


def test_a_rows_fields_are_in_every_step_and_in_no_answer_to_an_agent(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder, api_key=AGENT, admin_key=ADMIN) as gateway:
        base = told(gateway.post("/init_trajectory", {"metadata": ROW}, **bearer(AGENT)))["base_url"]
        again = {"headers": {"authorization": f"Bearer {AGENT}", "x-stainless-retry-count": "1"}}
        answers = [chat(gateway, base, "hi", **bearer(AGENT)), chat(gateway, base, "hi", **again)]
        said = told(answers[0])["choices"][0]["message"]
        answers.append(chat(gateway, base, [user("hi"), said, user("more")], **bearer(AGENT)))
        answers.append(gateway.post(f"{base}/v1/completions", {"prompt": "x"}, **bearer(AGENT)))
        answers.append(gateway.get(f"{base}/v1/models", **bearer(AGENT)))
        answers.append(gateway.post(f"{base}/v1/reward", {"reward": 1}, **bearer(AGENT)))
        answers.append(gateway.get("/trajectories", **bearer(AGENT)))
        answers.append(gateway.post(f"{base}/v1/fail_trajectory", {"reason": "x"}, **bearer(AGENT)))
        for answer in answers:
            told(answer)
            assert "the-secret" not in answer.text + str(answer.headers)
        for path in (f"/trajectories/{uid_of(base)}", "/pool/steps", "/stats"):
            assert gateway.get(path, **bearer(AGENT)).status_code == 401


def test_columns_that_are_named_like_a_steps_own_fields_change_no_conversation(rollout: Rollout, folder: Path) -> None:
    with DataPool() as pool:
        with in_front(rollout, folder, pool) as gateway:
            made = gateway.init(metadata=ROW)
            base, path = made["base_url"], made["base_url"].removeprefix(gateway.address)
            said = told(chat(gateway, base, "hi"))["choices"][0]["message"]
            told(gateway.post(f"{base}/v1/completions", {"prompt": "once upon"}))
        with in_front(rollout, folder, pool) as another:  # it reads the session from the pool
            told(chat(another, another.address + path, [user("hi"), said, user("more")]))
            told(another.post(f"{path}/v1/completions", {"prompt": "once upon"}))
            again = {"headers": {"x-stainless-retry-count": "1"}}
            told(chat(another, another.address + path, [user("hi"), said, user("more")], **again))
            steps = another.steps(uid_of(base))
        assert len(steps) == 4
        first, later = steps[0], steps[2]
        whole = [*first.prompt_ids.tolist(), *first.response_ids.tolist()]
        assert later.prompt_ids.tolist()[: len(whole)] == whole
        assert {step.metadata["ground_truth"] for step in steps} == {"the-secret"}
