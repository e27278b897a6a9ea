"""Keys: who may call, pay, and look in. And the numbers that operators read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.gateway.kit import Running, told
from tests.gateway.rollout import Rollout, answers, chat, error_of, in_front, uid_of, user

AGENT, REWARD, ADMIN = "agent-key", "reward-key", "admin-key"
WRONG: list[dict[str, Any]] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer"},
    {"authorization": "Basic YWdlbnQta2V5"},
    {"authorization": AGENT},
    {"authorization": f"Bearer {AGENT}x"},
    {"x-api-key": ""},
    {"x-api-key": "wrong"},
    {b"authorization": "Bearer größe".encode()},
    {b"x-api-key": b"\xff"},
]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder, api_key=AGENT, reward_key=REWARD, admin_key=ADMIN) as found:
        yield found


@pytest.fixture
def base(gateway: Running) -> str:
    body = {"metadata": {"truth": "42"}}
    return str(told(gateway.post("/init_trajectory", body, headers=bearer(AGENT)))["base_url"])


AGENTS: list[tuple[str, str, Any]] = [
    ("POST", "/init_trajectory", None),
    ("POST", "/generate", {"prompt_ids": [5]}),
    ("POST", "/submit_steps", {"steps": []}),
    ("GET", "/policy_version", None),
    ("POST", "{base}/v1/register_trajectory", None),
    ("GET", "{base}/v1/models", None),
]
REWARDS: list[tuple[str, str, Any]] = [
    ("POST", "{base}/v1/reward", {"reward": 1}),
    ("POST", "{base}/v1/complete_trajectory", {"reward": 1}),
    ("POST", "/complete_trajectory/{uid}", {"reward": 1}),
    ("POST", "{base}/v1/fail_trajectory", {"reason": "x"}),
    ("POST", "/fail_trajectory/{uid}", {"reason": "x"}),
    ("POST", "/compute_reward", {"prompt_ids": [1], "response_ids": [2]}),
]
ADMINS: list[tuple[str, str, Any]] = [
    ("GET", "/trajectories/{uid}", None),
    ("GET", "/stats", None),
    ("GET", "/metrics", None),
    ("GET", "/servers", None),
    ("POST", "/servers", {"address": "http://127.0.0.1:1"}),
    ("DELETE", "/servers", {"address": "http://127.0.0.1:1"}),
    ("POST", "/policy_version", {"version": 3}),
    ("POST", "/pause", None),
    ("POST", "/resume", None),
]


def sent(gateway: Running, base: str, route: tuple[str, str, Any], headers: dict[str, str]) -> int:
    method, path, body = route
    path = path.format(base=base, uid=uid_of(base))
    return gateway.http.request(method, path, json=body, headers=headers).status_code


@pytest.mark.parametrize("headers", WRONG, ids=str)
def test_without_the_right_key_nothing_is_open_but_health_and_readiness(
    gateway: Running, rollout: Rollout, base: str, headers: dict[str, str]
) -> None:
    refused = chat(gateway, base, "hi", headers=headers)
    fault = error_of(refused, 401)
    assert fault["type"] == "authentication_error"
    assert AGENT not in refused.text
    assert error_of(gateway.get(f"{base}/v1/models", headers=headers), 401)["type"] == "authentication_error"
    for route in (*AGENTS, *REWARDS, *ADMINS):
        assert sent(gateway, base, route, headers) == 401, route
    assert gateway.get("/health", headers=headers).status_code == 200
    assert gateway.get("/ready", headers=headers).status_code == 200
    assert rollout.orders == []
    assert gateway.steps(uid_of(base)) == []


@pytest.mark.parametrize(
    "headers", [bearer(AGENT), {"x-api-key": AGENT}, {"authorization": f"bearer {AGENT}"}], ids=str
)
def test_an_agents_key_opens_calls_and_nothing_else(
    gateway: Running, rollout: Rollout, base: str, headers: dict[str, str]
) -> None:
    told(chat(gateway, base, "hi", headers=headers))
    for route in AGENTS:
        assert sent(gateway, base, route, headers) in (200, 400), route
    for route in (*REWARDS, *ADMINS):
        assert sent(gateway, base, route, headers) == 401, route
    found = gateway.pool.trajectory(uid_of(base))
    assert (found.reward, found.complete) == (None, False)


def test_no_answer_to_an_agent_holds_the_metadata(gateway: Running, base: str) -> None:
    for method, path, body in AGENTS:
        where = path.format(base=base, uid=uid_of(base))
        assert "truth" not in gateway.http.request(method, where, json=body, headers=bearer(AGENT)).text
    answer = chat(gateway, base, "hi", headers=bearer(AGENT))
    assert "truth" not in answer.text
    assert "truth" not in str(answer.headers)
    shown = told(gateway.get(f"/trajectories/{uid_of(base)}", headers=bearer(ADMIN)))
    assert shown["metadata"] == {"truth": "42"}


def test_the_reward_key_pays_and_ends_but_does_not_look_in(gateway: Running, base: str) -> None:
    told(chat(gateway, base, "hi", headers=bearer(REWARD)))
    told(gateway.post(f"{base}/v1/reward", {"reward": 0.5}, headers={"x-api-key": REWARD}))
    for route in ADMINS:
        assert sent(gateway, base, route, bearer(REWARD)) == 401, route
    told(gateway.post(f"{base}/v1/complete_trajectory", headers=bearer(REWARD)))
    assert gateway.pool.trajectory(uid_of(base)).reward == 0.5


def test_the_admin_key_opens_everything(gateway: Running, base: str) -> None:
    for route in (*AGENTS, *REWARDS):
        assert sent(gateway, base, route, bearer(ADMIN)) not in (401, 403), route
    for method, path in (("GET", "/stats"), ("GET", "/metrics"), ("GET", "/servers"), ("POST", "/resume")):
        assert gateway.http.request(method, path, headers=bearer(ADMIN)).status_code == 200


def test_the_pools_own_routes_need_the_admin_key(gateway: Running) -> None:
    paths = {route.path for route in gateway.app.router.routes if route.path.startswith("/pool/")}
    assert paths
    for path in sorted(paths):
        plain = path.replace("{", "").replace("}", "").replace(":path", "")
        for method in ("GET", "POST"):
            for headers in ({}, bearer(AGENT), bearer(REWARD)):
                status = gateway.http.request(method, plain, headers=headers, content=b"").status_code
                assert status in (401, 405), (method, plain, status)


def test_without_an_admin_key_what_admins_see_is_closed_to_all(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder, api_key=AGENT) as gateway:
        base = told(gateway.post("/init_trajectory", headers=bearer(AGENT)))["base_url"]
        for route in ADMINS:
            for headers in ({}, bearer(AGENT), bearer("None"), {"x-api-key": ""}):
                assert sent(gateway, base, route, headers) == 401, route
        assert "--admin-key" in gateway.get("/stats", headers=bearer(AGENT)).json()["detail"]
        told(chat(gateway, base, "hi", headers=bearer(AGENT)))
        told(gateway.post(f"{base}/v1/complete_trajectory", {"reward": 1}, headers=bearer(AGENT)))


def test_with_only_a_reward_key_agents_need_none(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder, reward_key=REWARD) as gateway:
        base = gateway.init()["base_url"]
        told(chat(gateway, base, "hi"))
        assert gateway.post(f"{base}/v1/reward", {"reward": 1}).status_code == 401
        assert gateway.post(f"{base}/v1/complete_trajectory", {"reward": 1}).status_code == 401
        assert gateway.get("/stats", headers=bearer(REWARD)).status_code == 401
        told(gateway.post(f"{base}/v1/complete_trajectory", {"reward": 1}, headers=bearer(REWARD)))


def test_keys_are_those_of_files_without_the_end_of_the_line(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder, api_key=f"{AGENT}\n", admin_key=f" {ADMIN}\r\n") as gateway:
        told(gateway.post("/init_trajectory", headers=bearer(AGENT)))
        told(gateway.get("/stats", headers=bearer(ADMIN)))
        told(gateway.get("/stats", headers={"x-api-key": ADMIN}))


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_metrics_are_what_prometheus_reads(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder) as gateway:
        base = gateway.init(channel='we"ird\\ \n')["base_url"]
        answer = told(chat(gateway, base, "hi"))
        error_of(chat(gateway, base, "hi", temperature=-1), 400)
        rollout.script.append(answers(200, b"x"))
        error_of(chat(gateway, base, "hi"), 502)
        told(chat(gateway, base, [user("hi"), answer["choices"][0]["message"], user("more")]))
        shown = gateway.get("/metrics")
        assert shown.headers["content-type"].startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(shown.text)}
        assert all(name.startswith(("headrace_gateway_", "headrace_api_")) for name in families)
        assert all(family.documentation for family in families.values())

        def value(name: str, **labels: str) -> float:
            samples = families[f"headrace_gateway_{name}"].samples
            return sum(s.value for s in samples if s.labels == labels and not s.name.endswith(("_created",)))

        assert value("steps", channel='we"ird\\ \n') == 2
        assert value("prompts", channel='we"ird\\ \n', cause="extended") == 1
        for status, count in (("200", 2), ("400", 1), ("502", 1)):
            assert value("calls", route="chat/completions", status=status) == count
        assert value("ready") == 1
        assert value("server_up", server=rollout.address) == 1
        histogram = families["headrace_gateway_call_seconds"].samples
        buckets = [s.value for s in histogram if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets)
        assert [s.value for s in histogram if s.name.endswith("_count")] == [buckets[-1]] == [4]


def test_stats_hold_the_pools_ledger_and_the_gateways_counters(rollout: Rollout, folder: Path) -> None:
    with in_front(rollout, folder) as gateway:
        for channel in ("train", "val"):
            base = gateway.init(channel=channel)["base_url"]
            told(chat(gateway, base, "hi"))
        found = told(gateway.get("/stats"))
        assert set(found) == {"pool", "gateway"}
        assert {name: held["trajectories"] for name, held in found["pool"]["channels"].items()} == {
            "train": 1,
            "val": 1,
        }
        assert {channel: found["gateway"]["steps"][channel] for channel in ("train", "val")} == {"train": 1, "val": 1}
        asked = sum(len(order["prompt"]) for order in rollout.orders)
        tokens = found["gateway"]["tokens"]
        assert sum(tokens[channel]["prompt"] for channel in ("train", "val")) == asked
        assert found["gateway"]["in_flight"] == 0


# -- what an agent may not say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("beyond", [{"reward": 1.0}, {"is_last": True}], ids=["a reward", "an end"])
def test_steps_that_pay_or_end_need_the_reward_key(gateway: Running, beyond: dict[str, Any]) -> None:
    uid = f"flow-{'-'.join(beyond)}"
    step = {"prompt_ids": [5], "response_ids": [6], "trajectory_uid": uid}
    told(gateway.post("/submit_steps", {"steps": [step]}, headers=bearer(AGENT)))
    more = {"steps": [{**step, "step_index": 1, **beyond}]}
    assert gateway.post("/submit_steps", more, headers=bearer(AGENT)).status_code == 401
    assert len(gateway.steps(uid)) == 1
    told(gateway.post("/submit_steps", more, headers=bearer(REWARD)))
    assert len(gateway.steps(uid)) == 2


def test_advantages_in_place_of_a_reward_need_the_reward_key(gateway: Running, base: str) -> None:
    said = {"metadata": {"scored_group": True, "advantages": [0.0, 9.0]}}
    step = {"prompt_ids": [5], "response_ids": [6], "trajectory_uid": "flow-advantages", **said}
    tries: list[tuple[str, dict[str, Any]]] = [
        ("/submit_steps", {"steps": [step]}),
        ("/init_trajectory", said),
        (f"{base}/v1/register_trajectory", said),
    ]
    for path, body in tries:
        assert gateway.post(path, body, headers=bearer(AGENT)).status_code == 401, path
    for path, body in tries:
        told(gateway.post(path, body, headers=bearer(REWARD)))


def test_an_agents_key_adds_metadata_and_changes_none(gateway: Running, base: str) -> None:
    uid, register = uid_of(base), f"{base}/v1/register_trajectory"
    told(gateway.post(register, {"metadata": {"truth": "forty-three"}}, headers=bearer(ADMIN)))
    told(gateway.post(register, {"metadata": {"note": 1, "truth": "forty-three"}}, headers=bearer(AGENT)))
    answer = gateway.post(register, {"metadata": {"truth": "1", "other": 2}}, headers=bearer(AGENT))
    assert (answer.status_code, "forty-three" in answer.text) == (409, False)
    body = {"trajectory_uid": uid, "metadata": {"truth": "1"}}
    assert gateway.post("/init_trajectory", body, headers=bearer(AGENT)).status_code == 409
    assert gateway.pool.trajectory(uid).metadata == {"truth": "forty-three", "note": 1}
