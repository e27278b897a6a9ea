"""The dashboard on the servers that have a pool: the same page, to edit or to look alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tests.cli.command import Served
from tests.dashboard.test_follow import submit

from headrace import DataPool
from headrace.api import TrajectoryApiSettings
from headrace.api import create_app as api_app
from headrace.dashboard import DashboardMode
from headrace.dashboard.login import REQUEST_HEADER
from headrace.gateway.app import create_app as gateway_app
from headrace.gateway.settings import GatewaySettings

KEY = "the-admins"
OWN = {REQUEST_HEADER: "1", "x-api-key": KEY}
CHANGE = {"filter": {}, "changes": {"trainable": False}}


@pytest.fixture
def pool() -> Iterator[DataPool]:
    with DataPool(defaults={"n_rollouts": 2}) as found:
        submit(found, 0)
        yield found


def gateway(pool: DataPool, mode: DashboardMode) -> Starlette:
    return gateway_app(pool, GatewaySettings(vllm_addresses="http://127.0.0.1:1", admin_key=KEY, dashboard=mode))


def api(pool: DataPool, mode: DashboardMode) -> Starlette:
    return api_app(pool, TrajectoryApiSettings(api_key=KEY, dashboard=mode))


@pytest.mark.parametrize("served", [gateway, api])
def test_a_read_only_dashboard_refuses_every_change_and_says_so_to_the_page(
    pool: DataPool, served: Callable[[DataPool, DashboardMode], Starlette]
) -> None:
    for name, body in (("curate", CHANGE), ("undo", {})):
        answer = TestClient(served(pool, "read-only")).post(f"/dashboard/api/{name}", json=body, headers=OWN)
        assert (answer.status_code, "only reads" in answer.text) == (403, True)
        # Who may not even look is not told what may be done here.
        assert TestClient(served(pool, "read-only")).post(f"/dashboard/api/{name}", json=body).status_code == 401
    assert all(step.trainable for step in pool.trajectory("g0-0").steps)
    for mode in ("read-only", "edit"):
        asked = TestClient(served(pool, mode)).get("/dashboard/api/choices", headers=OWN)
        assert asked.json()["editable"] is (mode == "edit")


def test_a_trajectory_api_serves_the_page_and_what_environments_posted(pool: DataPool) -> None:
    group: dict[str, Any] = {"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0]}
    with TestClient(api(pool, "edit")) as client:
        page = client.get("/dashboard", follow_redirects=True)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        posted = client.post("/scored_data", json=group, headers=OWN)
        assert posted.status_code == 200, posted.text
        shown = client.get("/dashboard/api/overview", headers=OWN).json()
        assert (shown["ledger"]["submitted"], shown["scored_groups"]["posted"]) == (4, 1)
        listed = client.get("/dashboard/api/trajectories", headers=OWN, params={"uid": "g0-1"})
        assert listed.status_code == 200
        changed = client.post(
            "/dashboard/api/curate", headers=OWN, json={**CHANGE, "filter": None, "channel": "train", "uid": "g0-1"}
        )
        assert (changed.status_code, changed.json()["steps"]) == (200, 2)
    assert not any(step.trainable for step in pool.trajectory("g0-1").steps)


def test_a_pool_that_is_served_alone_says_where_its_dashboard_is() -> None:
    with Served("--dashboard", "read-only") as served:
        with httpx.Client(base_url=served.address, timeout=240, trust_env=False) as client:
            page = client.get("/dashboard", follow_redirects=True)
            answer = client.post("/dashboard/api/curate", json=CHANGE, headers=OWN)
        said = served.end()
    assert page.status_code == 200
    assert answer.status_code == 403
    assert f"the dashboard is {served.address}/dashboard" in said.err
