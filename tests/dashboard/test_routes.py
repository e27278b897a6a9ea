"""The dashboard over HTTP: who may look, what is sent with every answer, and that nothing can be changed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient
from tests.dashboard.test_follow import submit

from headrace import DataPool, Step
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.live import LiveFigures
from headrace.dashboard.login import MAX_WRONG, SESSION_S, DashboardLogin
from headrace.dashboard.records import Overview, TrajectoryQuery
from headrace.dashboard.routes import DashboardRoutes, dashboard_app
from headrace.dashboard.source import RunningPool

OWN = {"x-headrace-dashboard": "1", "origin": "http://testserver"}


class Time:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def client(clock: Time) -> Iterator[TestClient]:
    with DataPool(defaults={"n_rollouts": 2}) as pool:
        submit(pool, 0)
        app = dashboard_app(Dashboard(RunningPool(pool, "here")), DashboardLogin("s3cret", clock=clock))
        with TestClient(app) as found:
            yield found


def test_metadata_whose_keys_are_no_text_is_shown() -> None:
    metadata = {"cells": {(1, 2): "Alpha", b"raw": {None: "beta"}}}
    shown = {"(1, 2)": "Alpha", "b'raw'": {"null": "beta"}}
    with DataPool() as pool:
        pool.open("t", metadata=metadata)
        pool.submit_steps([Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t")])
        app = dashboard_app(Dashboard(RunningPool(pool, "here")), DashboardLogin(None))
        with TestClient(app) as client:
            found = client.get("/dashboard/api/trajectory", params={"channel": "train", "uid": "t"})
            assert found.status_code == 200, found.text
            assert found.json()["metadata"]["cells"] == shown


def test_nothing_is_shown_without_the_key_and_all_of_it_after_a_login(client: TestClient) -> None:
    assert isinstance(client.app, Starlette)
    routes = [route for route in client.app.routes if isinstance(route, Route) and "/api/" in route.path]
    views = [route.path for route in routes if "GET" in (route.methods or ())]
    assert len(views) == 18
    assert {client.get(path).status_code for path in views} == {401}
    answer = client.post("/dashboard/api/login", json={"key": "s3cret"}, headers=OWN)
    assert answer.status_code == 200
    said = answer.headers["set-cookie"]
    assert "HttpOnly" in said
    assert "SameSite=strict" in said
    assert "Path=/dashboard" in said
    assert "s3cret" not in said
    found = client.get("/dashboard/api/overview")
    assert found.status_code == 200
    assert found.json()["ledger"]["submitted"] == 4
    client.post("/dashboard/api/logout", headers=OWN)
    assert client.get("/dashboard/api/overview").status_code == 401


def test_a_cookie_ends_and_cannot_be_made_up(client: TestClient, clock: Time) -> None:
    client.post("/dashboard/api/login", json={"key": "s3cret"}, headers=OWN)
    assert client.get("/dashboard/api/choices").status_code == 200
    clock.now += SESSION_S
    assert client.get("/dashboard/api/choices").status_code == 401
    for made_up in ("", "9999999999.", "9999999999.abc", "x.y", "٣.x"):
        cookie = {b"cookie": f"{DashboardLogin('s3cret').cookie}={made_up}".encode()}
        assert client.get("/dashboard/api/choices", headers=cookie).status_code == 401


def test_two_dashboards_of_one_host_keep_their_own_logins(client: TestClient) -> None:
    with DataPool() as pool:
        app = dashboard_app(Dashboard(RunningPool(pool, "there")), DashboardLogin("another"))
        with TestClient(app, cookies=client.cookies) as other:
            for one, key in ((client, "s3cret"), (other, "another")):
                assert one.post("/dashboard/api/login", json={"key": key}, headers=OWN).status_code == 200
                client.cookies = other.cookies = one.cookies  # a browser has the same for every port of a host
            for one in (client, other):
                assert one.get("/dashboard/api/choices").json()["keyed"] is True
            client.post("/dashboard/api/logout", headers=OWN)
            other.cookies = client.cookies
            assert client.get("/dashboard/api/choices").status_code == 401
            assert other.get("/dashboard/api/choices").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://testserver"},
        {**OWN, "origin": "http://evil.example"},
        {**OWN, "origin": "null"},
        {**OWN, "sec-fetch-site": "cross-site"},
    ],
)
def test_a_page_of_another_site_logs_nobody_in(client: TestClient, headers: dict[str, str]) -> None:
    assert client.post("/dashboard/api/login", json={"key": "s3cret"}, headers=headers).status_code == 403


def test_wrong_keys_are_counted_and_then_refused_for_a_minute(client: TestClient, clock: Time) -> None:
    for _ in range(MAX_WRONG):
        assert client.post("/dashboard/api/login", json={"key": "guess"}, headers=OWN).status_code == 401
    assert client.post("/dashboard/api/login", json={"key": "s3cret"}, headers=OWN).status_code == 429
    clock.now += 61
    assert client.post("/dashboard/api/login", json={"key": "s3cret"}, headers=OWN).status_code == 200


@pytest.mark.parametrize(
    "path", ["/dashboard/", "/dashboard/main.js", "/dashboard/vendor/uplot.js", "/dashboard/api/overview"]
)
def test_every_answer_has_a_policy_without_inline_code(client: TestClient, path: str) -> None:
    policy = client.get(path).headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy


def test_files_beyond_the_page_cannot_be_reached(client: TestClient) -> None:
    for path in ("../routes.py", "%2e%2e/routes.py", "vendor/../../routes.py", "routes.py", "vendor/uplot.LICENSE"):
        assert client.get(f"/dashboard/{path}").status_code == 404


def test_nothing_but_the_login_and_curation_takes_a_post() -> None:
    with DataPool() as pool:
        served = DashboardRoutes(Dashboard(RunningPool(pool, "here")), DashboardLogin(None))
        writing = {r.path for r in served.routes if isinstance(r, Route) and (r.methods or set()) - {"GET", "HEAD"}}
        assert writing == {f"/dashboard/api/{name}" for name in ("login", "logout", "curate", "undo")}


def test_a_wrong_filter_is_named(client: TestClient) -> None:
    key = {"authorization": "Bearer s3cret"}
    for query, words in (
        ("sort=colour", "sort is 'colour'"),
        ("min_reward=much", "min_reward"),
        ("limit=0", "limit is 0"),
    ):
        answer = client.get(f"/dashboard/api/trajectories?{query}", headers=key)
        assert answer.status_code == 400
        assert words in answer.json()["detail"]
    answer = client.get("/dashboard/api/trajectory?channel=train&uid=none", headers=key)
    assert answer.status_code == 404
    assert "no trajectory 'none'" in answer.json()["detail"]


def test_without_an_admin_key_a_keyed_gateway_shows_nobody_anything() -> None:
    with DataPool() as pool:
        app = dashboard_app(Dashboard(RunningPool(pool, "here")), DashboardLogin(None, closed="there is no admin key"))
        with TestClient(app) as client:
            assert client.get("/dashboard/api/overview").status_code == 401
            assert client.post("/dashboard/api/login", json={"key": ""}, headers=OWN).status_code == 403


def test_a_settled_dashboard_has_what_the_pool_has() -> None:
    async def look() -> list[str]:
        with DataPool(defaults={"n_rollouts": 2}) as pool:
            for group in range(3):
                submit(pool, group)
            async with Dashboard(RunningPool(pool, "here")) as dashboard:
                await dashboard.settled()
                page = await dashboard.trajectories(TrajectoryQuery(sort="reward", limit=3))
                return [row.uid for row in page.rows]

    assert asyncio.run(look()) == ["g2-1", "g1-1", "g0-1"]


def test_a_stream_ends_when_its_server_is_to_stop() -> None:
    async def make() -> Overview:
        return Overview("t", 0.0, None, False, 0, {}, True, [], {}, [], [], 0)

    async def listen() -> list[bytes]:
        live, stop = LiveFigures(make, stream_s=3600), asyncio.Event()
        heard = []
        async for event in live.listen(stop.wait):
            heard.append(event)
            if event.startswith(b"data: "):
                stop.set()
        await live.close()
        return heard

    assert len(asyncio.run(listen())) == 2


def test_listeners_share_one_task_and_hear_only_of_changes() -> None:
    made = 0

    async def make() -> Overview:
        nonlocal made
        made += 1
        return Overview("t", float(made), None, False, made // 3, {}, True, [], {}, [], [], 0)

    async def listen() -> tuple[list[list[dict[str, object]]], int]:
        live = LiveFigures(make, beat_s=0.01)

        async def hear() -> list[dict[str, object]]:
            found: list[dict[str, object]] = []
            async for event in live.listen(asyncio.Event().wait):
                if event.startswith(b"data: "):
                    found.append(orjson.loads(event[6:]))
                if len(found) == 3:
                    break
            return found

        heard = await asyncio.gather(*(hear() for _ in range(5)))
        await live.close()
        return heard, live.made

    heard, beats = asyncio.run(listen())
    for events in heard:
        assert events[0]["title"] == "t"
        assert "at" not in events[0]
        assert [event.keys() for event in events[1:]] == [{"indexed"}, {"indexed"}]
    assert beats == made


def test_a_journalled_pool_lists_its_batches_and_says_what_became_of_a_trajectory(tmp_path: Path) -> None:
    with DataPool(tmp_path, durability="os", defaults={"n_rollouts": 2}) as pool:
        submit(pool, 0)
        pool.fetch_batch(1, timeout=0)
        with TestClient(dashboard_app(Dashboard(RunningPool(pool, "here")), DashboardLogin(None))) as client:
            page = client.get("/dashboard/api/consumption").json()
            assert [(row["number"], row["state"]) for row in page["rows"]] == [(1, "consumed")]
            (found,) = client.get("/dashboard/api/why", params={"name": "g0-1"}).json()
            assert found["verdict"].startswith("It was trained on")
            assert client.get("/dashboard/api/why", params={"name": "nobody"}).status_code == 404
            assert client.get("/dashboard/api/why").status_code == 400
            assert client.get("/dashboard/api/consumption", params={"limit": "0"}).status_code == 400
