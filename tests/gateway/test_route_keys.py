"""Every route of a gateway, one by one: which key opens it, and that a GET changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gateway.kit import Running, told
from tests.gateway.models.kit import with_models
from tests.gateway.rollout import Rollout, in_front
from tests.gateway.tenants.test_tenants import written
from tests.keys import DASHBOARD_CLOSED, DASHBOARD_OPEN, Opens, check_complete, doors, table

from headrace import DataPool
from headrace.gateway.worker_control import DROP_SESSION
from headrace.net.server import CHANGED_BY_GET

KEYS = {"api_key": "agents-own", "reward_key": "rewards-own", "admin_key": "admins-own"}
#: A tenant whose agents pay themselves, unless the gateway has a key for rewards; and one that has such a key itself.
TENANT, OTHER, OTHERS_REWARD = "tenants-own", "others-own", "others-reward"
TENANTS = {"acme": {"keys": [TENANT]}, "globex": {"keys": [OTHER], "reward_keys": [OTHERS_REWARD]}}


#: What agents call, below a trajectory's base URL and at the root.
CALLS = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
BASE = "/{trajectory_uid}/{prompt_uid}"
#: Every route of a gateway, by who may call it. Below a base URL, each is there with and without /v1.
ROUTES = table(
    {
        Opens.EVERYBODY: [
            *(f"GET {path}" for path in ("/health", "/ready", "/docs", "/docs/oauth2-redirect", "/redoc")),
            "GET /openapi.json",
            *DASHBOARD_OPEN,
            f"POST {DROP_SESSION}",  # said only among workers: nobody else finds it
        ],
        Opens.AGENT: [
            *(f"POST {below}/{name}" for below in ("/v1", f"{BASE}/v1", BASE) for name in CALLS),
            *(f"POST {below}/register_trajectory" for below in (f"{BASE}/v1", BASE)),
            *(f"GET {below}/models" for below in ("/v1", f"{BASE}/v1", BASE)),
            *(f"POST {below}/{{rest:path}}" for below in ("/v1", BASE)),
            *(f"POST {path}" for path in ("/init_trajectory", "/generate", "/submit_steps")),
            "GET /policy_version",
        ],
        Opens.REWARD: [
            *(f"POST {below}/reward" for below in (f"{BASE}/v1", BASE)),
            *(f"POST {below}/{end}_trajectory" for below in (f"{BASE}/v1", BASE) for end in ("complete", "fail")),
            *(f"POST /{end}_trajectory/{{trajectory_uid}}" for end in ("complete", "fail")),
            *("POST /compute_reward", "POST /v1/feedback"),
            *("GET /trajectories", "POST /trajectories", "DELETE /trajectories/{trajectory_uid}"),
        ],
        Opens.ADMIN: [
            *(f"POST {path}" for path in ("/policy_version", "/pause", "/resume", "/servers", "/pool/call")),
            *("GET /servers", "DELETE /servers", "GET /trajectories/{trajectory_uid}", "GET /stats", "GET /metrics"),
            *(f"GET /pool/{name}" for name in ("stats", "events", "groups", "trajectories", "steps")),
            "GET /pool/trajectories/{uid:path}",
            *(f"GET {path}" for path in ("/", "/wandb_info", "/info", "/batch", "/latest_example", "/status")),
            *("GET /status-env", "GET /reset_data", "POST /reset_data"),
            *(f"POST /{name}" for name in ("register", "register-env", "disconnect-env", "scored_data")),
            "POST /scored_data_list",
            *DASHBOARD_CLOSED,
        ],
    }
)


def url(path: str) -> str:
    """A path of that kind, with what makes it refuse whoever it lets in: nobody is to be paused here."""
    for name in ("trajectory_uid", "prompt_uid", "uid:path", "name:path", "rest:path"):
        path = path.replace(f"{{{name}}}", "embeddings" if name == "rest:path" else "nobody")
    return path + ("?lease_s=none" if path == "/pause" else "")


CONFIGURED: dict[str, dict[str, Any]] = {
    "the admin's": {"admin_key": KEYS["admin_key"]},
    "the agents'": {"api_key": KEYS["api_key"]},
    "the rewards'": {"reward_key": KEYS["reward_key"]},
    "all": KEYS,
    "tenants'": {"tenants": TENANT},
    "all and tenants'": {**KEYS, "tenants": TENANT},
}


#: Those with which a mistake of any of the others shows.
TELLING = ("the admin's", "all and tenants'")


@pytest.mark.parametrize(
    "given",
    [pytest.param(CONFIGURED[name], marks=[] if name in TELLING else pytest.mark.long, id=name) for name in CONFIGURED],
)
def test_with_any_key_set_what_is_not_the_agents_needs_the_admins(
    rollout: Rollout, folder: Path, tmp_path: Path, pool: DataPool, given: dict[str, str]
) -> None:
    settings = dict(given)
    if "tenants" in settings:
        settings["tenants"] = str(written(tmp_path, TENANTS))
    models = {"judge": {"mode": "pass", "addresses": "http://127.0.0.1:1"}}
    needs = {
        Opens.EVERYBODY: Opens.EVERYBODY,
        Opens.AGENT: Opens.AGENT if {"api_key", "tenants"} & given.keys() else Opens.EVERYBODY,
        Opens.ADMIN: Opens.ADMIN,
    }
    needs[Opens.REWARD] = Opens.REWARD if "reward_key" in given else needs[Opens.AGENT]
    held = {key: role for role, key in zip((Opens.AGENT, Opens.REWARD, Opens.ADMIN), KEYS.values(), strict=True)}
    opens = {key: role for key, role in held.items() if key in given.values()} | {"": Opens.EVERYBODY, "wrong": 0}
    of_tenants = {}
    if "tenants" in given:
        of_tenants = {TENANT: Opens.AGENT if "reward_key" in given else Opens.REWARD}
        of_tenants |= {OTHER: Opens.AGENT, OTHERS_REWARD: Opens.REWARD}
    with with_models(pool, rollout.address, folder, tmp_path / "m.json", models, open=True, **settings) as gateway:
        before = pool.stats()
        check_complete(gateway.app.router.routes, ROUTES)
        for method, path in doors(gateway.app.router.routes):
            role = ROUTES.get((method, path))
            for key, opened in {**opens, **of_tenants}.items():
                headers = {"authorization": f"Bearer {key}", "origin": "http://page.example"} if key else {}
                answer = gateway.http.request(method, url(path), headers=headers, content=b"")
                where = f"{method} {path} with {key!r}: {answer.status_code} {answer.text[:200]}"
                if role is None:  # it takes any method, and this is none of its own
                    assert answer.status_code == 405, where
                    continue
                # A tenant's key opens what its own role does. What is computed of no trajectory is no tenant's.
                closed = opened < role or path == "/compute_reward" if key in of_tenants else opened < needs[role]
                assert (answer.status_code == 401) == closed, where
                # The dashboard answers to no page of another site, whoever asks.
                refused = 403 if not path.startswith("/dashboard/api/") else 500
                assert answer.status_code not in (refused, 500), where
                assert path != DROP_SESSION or answer.status_code == 404, where
                assert not [name for name in answer.headers if name.startswith("access-control")], where
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
        for method, path in doors(gateway.app.router.routes):
            if method == "GET" and path not in CHANGED_BY_GET:
                for asked in ("GET", "HEAD"):
                    gateway.http.request(asked, url(path))
                    assert state() == before, f"{asked} {path}"


def servers_of(gateway: Running) -> list[dict[str, Any]]:
    return list(told(gateway.get("/servers"))["servers"])
