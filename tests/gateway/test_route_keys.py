"""Every route of a gateway, one by one: which key opens it, and that a GET changes nothing."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from tests.gateway.kit import Running, told
from tests.gateway.models.kit import with_models
from tests.gateway.rollout import Rollout, in_front
from tests.gateway.tenants.test_tenants import written

from headrace import DataPool
from headrace.gateway.worker_control import DROP_SESSION
from headrace.net.server import CHANGED_BY_GET

KEYS = {"api_key": "agents-own", "reward_key": "rewards-own", "admin_key": "admins-own"}
TENANT = "tenants-own"


class Opens(IntEnum):
    """What a route asks for, and what a key opens: each what those before it open."""

    EVERYBODY = 0
    AGENT = 1
    REWARD = 2
    ADMIN = 3


#: A page of documentation, and whether the process is well.
OPEN = {"/health", "/ready", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}
#: The dashboard's page, which holds nothing of anybody's, and its login.
OPEN |= {"/dashboard", "/dashboard/{name:path}", "/dashboard/api/login", "/dashboard/api/logout"}
#: What agents call; below a trajectory's base URL and at the root, with and without /v1.
CALLS = {"chat/completions", "completions", "responses", "messages", "messages/count_tokens", "models"}
AGENTS = {"/init_trajectory", "/generate", "/submit_steps", "register_trajectory", "{rest:path}", *CALLS}
ENDS = {"complete_trajectory", "fail_trajectory"}
REWARDS = {"/compute_reward", "/v1/feedback", "reward", *ENDS, *(f"/{name}/{{trajectory_uid}}" for name in ENDS)}
#: What whoever pays may do with trajectories.
OWN = {("GET", "/trajectories"), ("POST", "/trajectories"), ("DELETE", "/trajectories/{trajectory_uid}")}
#: Said only among workers: nobody else finds it.
AMONG_WORKERS = {DROP_SESSION}
BASE = "/{trajectory_uid}/{prompt_uid}/"


def asked_for(method: str, path: str) -> Opens:
    """What a route must ask for: the admin's key, unless it is one of those above."""
    name = path.removeprefix(BASE).removeprefix("/").removeprefix("v1/") if path.startswith((BASE, "/v1/")) else path
    if path in OPEN | AMONG_WORKERS:
        return Opens.EVERYBODY
    if {path, name} & REWARDS or (method, path) in OWN:
        return Opens.REWARD
    if {path, name} & AGENTS or (method, path) == ("GET", "/policy_version"):
        return Opens.AGENT
    return Opens.ADMIN


def doors(gateway: Running) -> list[tuple[str, str]]:
    """Every method and path that the application has; what names no methods is tried with the usual ones."""
    found = []
    for route in gateway.app.router.routes:
        assert isinstance(route, Route) or hasattr(route, "methods"), f"{route} is of a kind that is not looked at here"
        found += [(method, route.path) for method in sorted(route.methods or ("GET", "POST", "DELETE"))]
    return found


def url(path: str) -> str:
    """A path of that kind, with what makes it refuse whoever it lets in: nobody is to be paused here."""
    for name in ("trajectory_uid", "prompt_uid", "uid:path", "rest:path"):
        path = path.replace(f"{{{name}}}", "embeddings" if name == "rest:path" else "nobody")
    return path + ("?lease_s=none" if path == "/pause" else "")


CONFIGURED: dict[str, dict[str, Any]] = {
    "the admin's": {"admin_key": KEYS["admin_key"]},
    "the agents'": {"api_key": KEYS["api_key"]},
    "the rewards'": {"reward_key": KEYS["reward_key"]},
    "all": KEYS,
    "tenants'": {"tenants": TENANT},
}


@pytest.mark.parametrize("given", CONFIGURED.values(), ids=CONFIGURED)
def test_with_any_key_set_what_is_not_the_agents_needs_the_admins(
    rollout: Rollout, folder: Path, tmp_path: Path, pool: DataPool, given: dict[str, str]
) -> None:
    settings = dict(given)
    if "tenants" in settings:
        settings["tenants"] = str(written(tmp_path, {"acme": {"keys": [TENANT]}}))
    models = {"judge": {"mode": "pass", "addresses": "http://127.0.0.1:1"}}
    needs = {
        Opens.EVERYBODY: Opens.EVERYBODY,
        Opens.AGENT: Opens.AGENT if {"api_key", "tenants"} & given.keys() else Opens.EVERYBODY,
        Opens.ADMIN: Opens.ADMIN,
    }
    needs[Opens.REWARD] = Opens.REWARD if "reward_key" in given else needs[Opens.AGENT]
    held = {key: role for role, key in zip((Opens.AGENT, Opens.REWARD, Opens.ADMIN), KEYS.values(), strict=True)}
    opens = {key: role for key, role in held.items() if key in given.values()} | {"": Opens.EVERYBODY, "wrong": 0}
    if "tenants" in given:
        opens[TENANT] = Opens.REWARD
    with with_models(pool, rollout.address, folder, tmp_path / "m.json", models, open=True, **settings) as gateway:
        before = pool.stats()
        tried = doors(gateway)
        for method, path in tried:
            role = asked_for(method, path)
            for key, opened in opens.items():
                headers = {"authorization": f"Bearer {key}", "origin": "http://page.example"} if key else {}
                answer = gateway.http.request(method, url(path), headers=headers, content=b"")
                where = f"{method} {path} with {key!r}: {answer.status_code} {answer.text[:200]}"
                if answer.status_code == 405:  # it names no methods, and this is none of its own
                    continue
                # What is computed of no trajectory is no tenant's.
                closed = opened < needs[role] or (path == "/compute_reward" and key == TENANT)
                assert (answer.status_code == 401) == closed, where
                assert not [name for name in answer.headers if name.startswith("access-control")], where
        assert len(tried) > 60
        assert {"/batch", "/reset_data", "/register", "/pool/call", "/pause"} <= {path for _, path in tried}
        assert pool.stats()["ledger"] == before["ledger"]


def test_no_get_changes_anything_but_those_of_the_trajectory_apis_wire(rollout: Rollout, folder: Path) -> None:
    """The two are the original's: `GET /batch` takes a batch, `GET /reset_data` empties the queue."""
    with in_front(rollout, folder) as gateway:
        base = gateway.init(metadata={"a": 1})["base_url"]
        told(gateway.post(f"{base}/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}))
        told(gateway.post("/policy_version", {"version": 3}))

        def state() -> Any:
            held = gateway.pool
            ledger = {
                name: value for name, value in held.stats().items() if "seconds" not in name and "age" not in name
            }
            rows = [held.list_trajectories(), held.list_groups(), len(held.events())]
            servers = [{name: each[name] for name in ("address", "state", "version")} for each in servers_of(gateway)]
            return ledger["ledger"], ledger["desk"], rows, servers, told(gateway.get("/policy_version"))

        before = state()
        for method, path in doors(gateway):
            if method in ("GET", "HEAD") and path not in CHANGED_BY_GET:
                gateway.http.request(method, url(path))
                assert state() == before, f"{method} {path}"


def servers_of(gateway: Running) -> list[dict[str, Any]]:
    return list(told(gateway.get("/servers"))["servers"])
