"""Tenants: each sees and pays its own trajectories only, within its own bounds, whatever another does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.kit import Running, told, until
from tests.gateway.rollout import Rollout, Say, chat, error_of, in_front, user

from headrace import DataPool
from headrace.data.errors import InvalidInput
from headrace.gateway import Settings
from headrace.gateway.access import Access
from headrace.gateway.config_files import read_tenants
from headrace.gateway.counters import GatewayCounters
from headrace.gateway.errors import Refusal
from headrace.gateway.tenants import Tenant

Json = dict[str, Any]
ADMIN = "admin-key"
TENANTS: Json = {
    "alpha": {"keys": ["alpha-key"], "channels": ["train", "val"]},
    "beta": {"keys": ["beta-key", "beta-key-2"], "channels": ["beta"], "reward_keys": ["beta-reward"]},
}


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def written(folder: Path, tenants: Json) -> Path:
    path = folder / "tenants.json"
    path.write_text(json.dumps({"tenants": tenants}))
    return path


@contextmanager
def serving(rollout: Rollout, folder: Path, tmp: Path, tenants: Json, **settings: Any) -> Iterator[Running]:
    with in_front(rollout, folder, tenants=str(written(tmp, tenants)), admin_key=ADMIN, **settings) as gateway:
        yield gateway


@pytest.fixture
def gateway(rollout: Rollout, folder: Path, tmp_path: Path) -> Iterator[Running]:
    with serving(rollout, folder, tmp_path, TENANTS) as found:
        yield found


def begin(gateway: Running, key: str, **body: Any) -> Json:
    found: Json = told(gateway.post("/init_trajectory", body or None, headers=by(key)))
    return found


def test_the_same_uid_is_another_trajectory_for_each_tenant(gateway: Running) -> None:
    for key in ("alpha-key", "beta-key"):
        begun = begin(gateway, key, trajectory_uid="t", prompt_uid="p")
        assert (begun["trajectory_uid"], begun["base_url"]) == ("t", f"{gateway.address}/t/p")
        told(chat(gateway, begun["base_url"], f"from {key}", headers=by(key)))
    for tenant, channel in (("alpha", "train"), ("beta", "beta")):
        found = gateway.pool.trajectory(f"{tenant}/t")
        assert (found.prompt_uid, found.channel, len(found)) == (f"{tenant}/p", channel, 1)
    shown = told(gateway.get("/trajectories/alpha%2Ft", headers=by(ADMIN)))
    assert len(shown["steps"]) == 1


def test_nothing_of_another_tenants_can_be_called_paid_ended_or_added_to(gateway: Running) -> None:
    base = begin(gateway, "alpha-key", trajectory_uid="t", prompt_uid="p", metadata={"a": 1})["base_url"]
    told(chat(gateway, base, "hi", headers=by("alpha-key")))
    for uid in ("t", "alpha%2Ft", "..%2Falpha%2Ft"):
        theirs = f"{gateway.address}/{uid}/p"
        for key in ("beta-key", "beta-reward"):
            assert error_of(chat(gateway, theirs, "hi", headers=by(key)), 404)["code"] == "unknown_trajectory"
        for path in (f"{theirs}/v1/reward", f"{theirs}/v1/complete_trajectory", f"/complete_trajectory/{uid}"):
            assert gateway.post(path, {"reward": 9}, headers=by("beta-reward")).status_code == 404
    step = {"prompt_ids": [5], "response_ids": [6], "trajectory_uid": "t", "prompt_uid": "p", "step_index": 1}
    told(gateway.post("/submit_steps", {"steps": [step]}, headers=by("beta-key")))
    assert len(gateway.pool.trajectory("beta/t")) == 1
    found = gateway.pool.trajectory("alpha/t")
    assert (len(found), found.complete, found.reward, found.metadata) == (1, False, None, {"a": 1})


def test_channels_that_are_not_its_own_are_closed_to_a_tenant(gateway: Running) -> None:
    key = by("beta-key")
    assert gateway.post("/init_trajectory", {"channel": "train"}, headers=key).status_code == 403
    assert gateway.post("/submit_steps?channel=train", {"steps": []}, headers=key).status_code == 403
    base = begin(gateway, "beta-key")["base_url"]
    assert gateway.post(f"{base}/v1/register_trajectory", {"channel": "val"}, headers=key).status_code == 403
    assert begin(gateway, "alpha-key", channel="val")["base_url"]
    assert {name for name, found in gateway.pool.stats()["channels"].items() if found["trajectories"]} == {
        "beta",
        "val",
    }


@pytest.mark.parametrize("key", ["alpha-key", "beta-key", "beta-reward"])
def test_what_is_everybodys_is_closed_to_a_tenants_keys(gateway: Running, key: str) -> None:
    for method, path, body in (
        ("GET", "/stats", None),
        ("GET", "/metrics", None),
        ("GET", "/trajectories/x", None),
        ("POST", "/policy_version", {"version": 1}),
        ("POST", "/pause", None),
        ("GET", "/pool/stats", None),
        ("GET", "/batch", None),
        ("POST", "/scored_data", {}),
    ):
        assert gateway.http.request(method, path, json=body, headers=by(key)).status_code == 401, path
    assert told(gateway.get("/policy_version", headers=by(key)))["version"] == 0


def test_without_a_tenants_key_there_is_no_way_in(gateway: Running, rollout: Rollout) -> None:
    base = begin(gateway, "alpha-key")["base_url"]
    for headers in ({}, by("alpha"), by("alpha-key2"), {"x-api-key": "beta"}, {"authorization": "Bearer"}):
        error_of(chat(gateway, base, "hi", headers=headers), 401)
    anthropic = gateway.post(f"{base}/v1/messages", {}, headers={"x-api-key": "wrong"})
    assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (401, "authentication_error")
    assert rollout.orders == []


def test_with_reward_keys_of_its_own_a_tenants_agents_cannot_pay_themselves(gateway: Running) -> None:
    base = begin(gateway, "beta-key", trajectory_uid="t")["base_url"]
    told(chat(gateway, base, "hi", headers=by("beta-key-2")))
    assert gateway.post(f"{base}/v1/reward", {"reward": 1}, headers=by("beta-key")).status_code == 401
    told(gateway.post(f"{base}/v1/complete_trajectory", {"reward": 1}, headers=by("beta-reward")))
    base = begin(gateway, "alpha-key", trajectory_uid="t")["base_url"]
    told(chat(gateway, base, "hi", headers=by("alpha-key")))
    told(gateway.post(f"{base}/v1/complete_trajectory", {"reward": 2}, headers=by("alpha-key")))
    assert [gateway.pool.trajectory(f"{name}/t").reward for name in ("beta", "alpha")] == [1, 2]


def test_an_agent_of_no_tenant_reaches_none(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    with serving(rollout, folder, tmp_path, TENANTS, api_key="anybody") as gateway:
        begin(gateway, "alpha-key", trajectory_uid="t", prompt_uid="p")
        body = {"messages": [user("hi")]}
        where = f"{gateway.address}/alpha%2Ft/alpha%2Fp/v1/chat/completions"
        assert error_of(gateway.post(where, body, headers=by("anybody")), 403)["code"] == "not_yours"
        assert gateway.post("/init_trajectory", {"trajectory_uid": "beta/x"}, headers=by("anybody")).status_code == 403
        begin(gateway, "anybody", trajectory_uid="gamma/x")


# -- bounds ------------------------------------------------------------------------------------------------------------


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def one(tmp: Path, clock: Clock, counters: GatewayCounters, **bounds: Any) -> Tenant:
    spec = read_tenants(written(tmp, {"a": {"keys": ["k"], **bounds}}))["a"]
    return Tenant("a", spec, counters, clock)


def refused(tenant: Tenant) -> Refusal:
    with pytest.raises(Refusal) as found, tenant.admitted():
        pass
    assert found.value.status == 429
    return found.value


def test_a_rate_lets_a_burst_through_and_then_as_many_as_come_in(tmp_path: Path) -> None:
    clock, counters = Clock(), GatewayCounters()
    tenant = one(tmp_path, clock, counters, calls_per_s=2, burst=3)
    for _ in range(3):
        with tenant.admitted():
            pass
    assert refused(tenant).retry_after == 0.5
    clock.now += 0.5
    with tenant.admitted():
        pass
    assert refused(tenant).retry_after == 0.5
    assert counters.as_dict()["tenant_requests"] == {"a": {"taken": 4, "rate": 2}}


def test_tokens_are_counted_when_they_are_known_and_paid_back_before_the_next_call(tmp_path: Path) -> None:
    clock, counters = Clock(), GatewayCounters()
    tenant = one(tmp_path, clock, counters, tokens_per_s=10)
    with tenant.admitted():
        tenant.used(600, 100)
    assert refused(tenant).retry_after == 10
    clock.now += 10
    with tenant.admitted():
        pass
    assert counters.as_dict()["tenant_tokens"] == {"a": {"prompt": 600, "sampled": 100}}


def test_what_is_under_way_counts_until_it_ends_however_it_ends(tmp_path: Path) -> None:
    tenant = one(tmp_path, Clock(), GatewayCounters(), concurrency=1)
    with suppress(KeyError), tenant.admitted():
        refused(tenant)
        raise KeyError
    with tenant.admitted():
        assert tenant.in_flight == 1


def test_what_was_sampled_for_a_client_that_left_is_paid_for(gateway: Running, rollout: Rollout) -> None:
    base = begin(gateway, "alpha-key")["base_url"]
    gate = rollout.gate()
    rollout.script.append(Say("one two three four five", after=(3, gate)))
    body = {"model": "m", "messages": [user("hi")], "stream": True}
    with gateway.http.stream("POST", f"{base}/v1/chat/completions", json=body, headers=by("alpha-key")) as answer:
        gate.reached()
        events = (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line)
        assert any(event["choices"][0]["delta"].get("content") for event in events)

    def paid() -> Json:
        return dict(told(gateway.get("/stats", headers=by(ADMIN)))["gateway"].get("tenant_tokens") or {})

    until(lambda: "sampled" in paid().get("alpha", {}))
    gate.open()
    found = paid()["alpha"]
    assert found["prompt"] == len(rollout.orders[0]["prompt"])
    assert 0 < found["sampled"] < 5


def test_past_its_rate_each_dialect_says_so_in_its_own_words(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    tenants = {"a": {"keys": ["k"], "calls_per_s": 0.001, "burst": 1, "max_body_mb": 0.001}}
    with serving(rollout, folder, tmp_path, tenants) as gateway:
        base = begin(gateway, "k")["base_url"]
        answer = chat(gateway, base, "hi", headers=by("k"))
        assert error_of(answer, 429)["type"] == "rate_limit_error"
        assert 1 <= int(answer.headers["retry-after"]) <= 1000
        answer = gateway.post(f"{base}/v1/messages", {}, headers={"x-api-key": "k"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert gateway.post("/init_trajectory", headers=by("k")).status_code == 429
        assert rollout.orders == []


def test_a_tenants_own_bound_on_bodies_is_below_everybodys(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    tenants = {"small": {"keys": ["s"], "max_body_mb": 0.001}, "large": {"keys": ["l"]}}
    with serving(rollout, folder, tmp_path, tenants) as gateway:
        for key, status in (("s", 413), ("l", 200)):
            base = begin(gateway, key)["base_url"]
            assert chat(gateway, base, "x" * 2000, headers=by(key)).status_code == status


# -- one hostile, one at work ------------------------------------------------------------------------------------------

AGENTS, TURNS = 4, 6


def test_a_hostile_tenant_is_not_noticed_by_another(rollout: Rollout, folder: Path, tmp_path: Path) -> None:
    """One is at work; the other tries wrong keys, others' uids, huge bodies and far too many calls."""
    rollout.reply = lambda asked: Say("fine")
    tenants = {
        "good": {"keys": ["good"]},
        "bad": {
            "keys": ["bad"],
            "channels": ["bad"],
            "calls_per_s": 0.01,
            "burst": 20,
            "concurrency": 2,
            "max_body_mb": 0.01,
        },
    }
    with serving(rollout, folder, tmp_path, tenants) as gateway, ThreadPoolExecutor(AGENTS + 2) as threads:
        bases = [begin(gateway, "good", trajectory_uid=f"t{at}", prompt_uid="p")["base_url"] for at in range(AGENTS)]
        done = [threads.submit(work, gateway.address, base) for base in bases]
        attacks = [threads.submit(attack, gateway.address, bases, done) for _ in range(2)]
        assert [answer.result() for answer in done] == [[200] * TURNS] * AGENTS
        statuses = set().union(*(attack.result() for attack in attacks))
        assert statuses <= {200, 401, 403, 404, 413, 429}, statuses
        assert {401, 429} <= statuses
        for at in range(AGENTS):
            found = gateway.pool.trajectory(f"good/t{at}")
            assert (len(found), found.complete, found.reward) == (TURNS, False, None)
        channels = gateway.pool.stats()["channels"]
        assert channels["train"]["ledger"]["submitted"] == AGENTS * TURNS
        assert channels["train"]["trajectories"] == AGENTS
        counted = told(gateway.get("/stats", headers=by(ADMIN)))["gateway"]["tenant_requests"]
        assert counted["good"] == {"taken": AGENTS * (TURNS + 1)}
        assert counted["bad"].keys() - {"taken"}


def work(address: str, base: str) -> list[int]:
    """A conversation of several turns."""
    said: list[Json] = []
    statuses = []
    with httpx.Client(timeout=120, trust_env=False, headers=by("good")) as http:
        for turn in range(TURNS):
            said.append(user(f"turn {turn}"))
            answer = http.post(f"{base}/v1/chat/completions", json={"messages": said})
            statuses.append(answer.status_code)
            said.append(answer.json()["choices"][0]["message"])
    return statuses


def attack(address: str, bases: list[str], done: list[Any]) -> set[int]:
    """Everything that is not allowed, for as long as the others work, and at least twenty times."""
    statuses = set()
    body = {"messages": [user("hi")]}
    huge = b'{"messages": "' + b"x" * 200_000 + b'"}'
    rounds = 0
    with httpx.Client(timeout=120, trust_env=False, base_url=address) as http:
        while rounds < 20 or not all(answer.done() for answer in done):
            rounds += 1
            base = bases[rounds % len(bases)]
            for answer in (
                http.post(f"{base}/v1/chat/completions", json=body, headers=by("goood")),
                http.post(f"{base}/v1/chat/completions", json=body, headers=by("bad")),
                http.post(f"{base}/v1/complete_trajectory", json={"reward": -9}, headers=by("bad")),
                http.post("/complete_trajectory/good%2Ft0", json={"reward": -9}, headers=by("bad")),
                http.post("/init_trajectory", json={"trajectory_uid": "t0", "channel": "train"}, headers=by("bad")),
                http.post("/init_trajectory", content=huge, headers=by("bad")),
            ):
                statuses.add(answer.status_code)
    return statuses


# -- the file ----------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Json, str]] = {
    "no keys": ({"a": {"keys": []}}, "tenants.a: keys is empty"),
    "an empty key": ({"a": {"keys": [""]}}, "tenants.a: a key is empty"),
    "a key that no header carries": ({"a": {"keys": ["сек-рет"]}}, "tenants.a: one of its keys: a key is printable"),
    "a key that is not set": ({"a": {"keys": ["env:HEADRACE_NO_SUCH"]}}, "HEADRACE_NO_SUCH is not set"),
    "one key for two": ({"a": {"keys": ["k"]}, "b": {"keys": ["k"]}}, "tenants.b: one of its keys stands twice"),
    "one key for both roles": ({"a": {"keys": ["k"], "reward_keys": ["k"]}}, "one of its keys stands twice"),
    "unknown": ({"a": {"keys": ["k"], "calls_per_sec": 1}}, "'calls_per_sec' is unknown; did you mean calls_per_s"),
    "no rate": ({"a": {"keys": ["k"], "calls_per_s": 0}}, "tenants.a: Expected `float` > 0"),
    "a burst of nothing": ({"a": {"keys": ["k"], "burst": 2}}, "burst says how much of calls_per_s"),
    "no channel": ({"a": {"keys": ["k"], "channels": []}}, "channels is empty"),
    "a slash": ({"a/b": {"keys": ["k"]}}, "the name holds a '/'"),
}


@pytest.mark.parametrize(("tenants", "said"), WRONG.values(), ids=WRONG)
def test_what_could_not_work_is_refused_and_no_key_is_told(tmp_path: Path, tenants: Json, said: str) -> None:
    with pytest.raises(InvalidInput) as found:
        read_tenants(written(tmp_path, tenants))
    assert said in str(found.value)
    assert "'k'" not in str(found.value)


def test_a_key_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TEST_KEY", "out of sight")
    assert read_tenants(written(tmp_path, {"a": {"keys": ["env:HEADRACE_TEST_KEY"]}}))["a"].keys == ["out of sight"]
    monkeypatch.setenv("HEADRACE_TEST_KEY", "of a file\n")
    assert read_tenants(written(tmp_path, {"a": {"keys": ["env:HEADRACE_TEST_KEY"]}}))["a"].keys == ["of a file"]


def test_a_tenants_key_cannot_be_the_gateways(tmp_path: Path) -> None:
    file = str(written(tmp_path, {"a": {"keys": ["same"]}}))
    settings = Settings(vllm_addresses="http://a:1", tokenizer_path="x", tenants=file, admin_key="same")
    with pytest.raises(InvalidInput, match="is also the gateway's own"):
        Access(settings, GatewayCounters())


def test_the_pool_keeps_what_is_there_where_it_is_told_to() -> None:
    with DataPool() as pool:
        pool.open("t", metadata={"truth": 1})
        pool.open("t", metadata={"truth": 1, "more": 2}, keep=True)
        with pytest.raises(Exception, match="'truth' in its metadata, which stays"):
            pool.open("t", metadata={"truth": 3}, keep=True)
        assert pool.trajectory("t").metadata == {"truth": 1, "more": 2}
