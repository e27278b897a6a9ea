"""What people decide by hand: it is in the pool, is masked out of training, is exported, and can be undone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.dashboard.test_follow import submit

from headrace import DataPool
from headrace.dashboard.curation import ANYBODY, Changes, Curator
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.login import REQUEST_HEADER, DashboardLogin
from headrace.dashboard.routes import dashboard_app
from headrace.dashboard.source import RunningPool
from headrace.data.errors import InvalidInput

OWN = {REQUEST_HEADER: "1", "origin": "http://testserver"}


@pytest.fixture
def pool() -> Iterator[DataPool]:
    with DataPool(defaults={"n_rollouts": 2}) as found:
        for group in range(4):
            submit(found, group)
        yield found


@pytest.fixture
def client(pool: DataPool) -> Iterator[TestClient]:
    dashboard = Dashboard(RunningPool(pool, "here", editable=True))
    with TestClient(dashboard_app(dashboard, DashboardLogin(None))) as found:
        assert found.portal is not None
        found.portal.call(dashboard.read_once)
        yield found


def curated(pool: DataPool, uid: str) -> list[tuple[Any, ...]]:
    return [(step.trainable, step.quality, step.tags, step.note) for step in pool.trajectory(uid).steps]


def post(client: TestClient, name: str, body: Any, **headers: str) -> Any:
    answer = client.post(f"/dashboard/api/{name}", json=body, headers={**OWN, **headers})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_step_is_masked_out_of_training_with_who_did_it_and_when(client: TestClient, pool: DataPool) -> None:
    body = {"channel": "train", "uid": "g0-1", "step": 0, "by": "anna", "changes": {"trainable": False, "note": "no"}}
    assert post(client, "curate", body) == {"trajectories": 1, "steps": 1, "refused": 0, "undo": 1, "kept_rewards": 0}
    assert curated(pool, "g0-1") == [(False, None, (), "no"), (True, None, (), None)]
    about = pool.trajectory("g0-1").steps[0].metadata["curation"]
    assert about["by"] == "anna"
    assert about["at"] > 1e9
    spans = [span for sequence in pool.trajectory("g0-1").sequences() for span in sequence.spans]
    assert [span.step_index for span in spans if span.trained] == [1]
    shown = client.get("/dashboard/api/trajectory", params={"channel": "train", "uid": "g0-1"}).json()
    assert (shown["steps"][0]["trainable"], shown["steps"][0]["note"]) == (False, "no")


def test_all_that_a_filter_shows_is_changed_and_brought_back(client: TestClient, pool: DataPool) -> None:
    before = {uid: curated(pool, uid) for uid in ("g1-0", "g1-1", "g3-0", "g0-0")}
    body = {"filter": {"tag": "odd", "min_reward": "1"}, "changes": {"quality": 0.5, "tags": ["seen"]}}
    assert post(client, "curate", body)["steps"] == 4
    assert curated(pool, "g3-1") == [(True, 0.5, ("seen",), None)] * 2
    assert curated(pool, "g1-0") == before["g1-0"]
    assert pool.trajectory("g3-1").steps[0].metadata["curation"]["by"] == ANYBODY
    rows = client.get("/dashboard/api/trajectories", params={"tag": "seen"}).json()["rows"]
    assert {row["uid"] for row in rows} == {"g1-1", "g3-1"}
    assert post(client, "undo", {"by": "anna"})["steps"] == 4
    assert {uid: curated(pool, uid) for uid in before} == before
    assert client.post("/dashboard/api/undo", json={}, headers=OWN).status_code == 400


def test_a_reward_by_hand_stands_and_goes_back_to_what_it_was(client: TestClient, pool: DataPool) -> None:
    post(client, "curate", {"channel": "train", "uid": "g2-1", "changes": {"reward": 9.0}})
    assert pool.trajectory("g2-1").reward == 9.0
    assert pool.reward("g2-1", 0.0) == "kept"
    post(client, "undo", {})
    assert pool.trajectory("g2-1").reward == 1.0


def test_what_a_trainer_has_stays_as_it_is(client: TestClient, pool: DataPool) -> None:
    pool.fetch_batch(1, lease_s=60.0, timeout=0)
    done = post(client, "curate", {"filter": {}, "changes": {"trainable": False}})
    assert (done["trajectories"], done["refused"]) == (6, 2)
    assert curated(pool, "g0-0")[0][0] is True


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"channel": "train", "uid": "g0-0", "changes": {}}, "changes is empty"),
        ({"changes": {"note": "x"}}, "either a trajectory"),
        ({"uid": "g0-0", "changes": {"note": "x"}}, "channel is missing"),
        ({"channel": "train", "uid": "g0-0", "changes": {"quality": "high"}}, "the body is wrong"),
        ({"channel": "train", "uid": "g0-0", "changes": {"colour": 1}}, "the body is wrong"),
        ({"filter": {"min_reward": "x"}, "changes": {"note": "x"}}, "the filter is wrong"),
    ],
)
def test_a_wrong_request_changes_nothing_and_says_why(client: TestClient, body: Any, said: str) -> None:
    answer = client.post("/dashboard/api/curate", json=body, headers=OWN)
    assert answer.status_code == 400
    assert said in answer.json()["detail"]


def test_pages_of_other_sites_and_dashboards_that_only_read_change_nothing(pool: DataPool) -> None:
    body = {"filter": {}, "changes": {"trainable": False}}
    for editable in (True, False):
        dashboard = Dashboard(RunningPool(pool, "here", editable=editable))
        with TestClient(dashboard_app(dashboard, DashboardLogin("s3cret"))) as client:
            assert client.post("/dashboard/api/curate", json=body, headers=OWN).status_code == 401
            key = {"authorization": "Bearer s3cret"}
            for headers in (
                {},
                {"origin": "http://evil.example", REQUEST_HEADER: "1"},
                {"sec-fetch-site": "cross-site"},
            ):
                assert client.post("/dashboard/api/curate", json=body, headers={**key, **headers}).status_code == 403
            assert client.get("/dashboard/api/choices", headers=key).json()["editable"] is editable
            if not editable:
                answer = client.post("/dashboard/api/curate", json=body, headers={**key, **OWN})
                assert (answer.status_code, "only reads" in answer.text) == (403, True)
                answer = client.post("/dashboard/api/undo", json={}, headers={**key, **OWN})
                assert (answer.status_code, "only reads" in answer.text) == (403, True)
    assert curated(pool, "g0-0")[0][0] is True


def test_more_steps_than_a_person_waits_for_are_refused_before_any_is_changed(
    pool: DataPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.dashboard.curation.MAX_STEPS", 5)
    curator = Curator(RunningPool(pool, "here", editable=True))
    keys = [("train", f"g{group}-0") for group in range(4)]
    with pytest.raises(InvalidInput, match="more than 5 steps"):
        curator.apply(keys, None, Changes(trainable=False), "")
    assert curated(pool, "g0-0")[0][0] is True
