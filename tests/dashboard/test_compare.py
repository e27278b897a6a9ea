"""Two runs side by side: figures, curves, and the same prompts in both."""

from __future__ import annotations

from starlette.testclient import TestClient
from tests.dashboard.test_follow import submit

from headrace import DataPool
from headrace.dashboard.compare import RunSummary, compare, merged, summary, with_parts
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.index import TrajectoryIndex
from headrace.dashboard.login import DashboardLogin
from headrace.dashboard.records import TrajectoryRecord
from headrace.dashboard.routes import dashboard_app
from headrace.dashboard.source import RunningPool


def run_of(title: str, rewards: dict[str, list[float | None]]) -> RunSummary:
    index = TrajectoryIndex()
    for prompt, those in rewards.items():
        for at, reward in enumerate(those):
            index.put(TrajectoryRecord(f"{prompt}-{at}", prompt, "train", steps=2, tokens=10 * (at + 1), reward=reward))
    return summary(title, index)


def test_prompts_of_both_come_by_how_much_their_rewards_differ() -> None:
    here = run_of(
        "a", {"same": [1.0], "better": [1.0, 0.5], "worse": [0.0, 0.1], "unknown": [None], "only here": [1.0]}
    )
    there = run_of("a", {"same": [1.0], "better": [0.5], "worse": [1.0], "unknown": [1.0], "only there": [1.0]})
    found = compare(here, there, ({}, {}), 0, 10)
    assert [(one.prompt_uid, one.gain) for one in found.prompts] == [
        ("worse", -0.95),
        ("better", 0.25),
        ("same", 0.0),
        ("unknown", None),
    ]
    assert found.prompts[0].here.best.uid == "worse-1"
    assert (found.here.trajectories, found.here.prompts, found.here.turns) == (7, 5, 2.0)
    assert compare(here, there, ({}, {}), 1, 2).prompts == found.prompts[1:3]


def test_curves_of_both_have_one_axis() -> None:
    here = {"reward": {"step": [1, 2], "reward": [0.1, 0.2]}}
    there = {"reward": {"step": [2, 3], "reward": [0.5, 0.6]}, "entropy": {"step": [2], "entropy": [1.5]}}
    found = merged(here, there)
    assert found["reward"] == {"step": [1, 2, 3], "this run": [0.1, 0.2, None], "the other": [None, 0.5, 0.6]}
    assert found["entropy"] == {"step": [2], "this run": [None], "the other": [1.5]}


def test_two_pools_are_served_as_one_comparison_and_one_alone_says_that_it_is() -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool, DataPool(defaults={"n_rollouts": 2}) as earlier:
        for group in range(3):
            submit(pool, group)
        for group in range(2):
            submit(earlier, group, rollouts=1)
        other = Dashboard(RunningPool(earlier, "before"))
        dashboard = Dashboard(RunningPool(pool, "now"), beside=other)
        with TestClient(dashboard_app(dashboard, DashboardLogin(None))) as client:
            assert client.portal is not None
            client.portal.call(dashboard.read_once)
            client.portal.call(other.read_once)
            assert client.get("/dashboard/api/choices").json()["beside"] == "before"
            found = client.get("/dashboard/api/comparison").json()
            assert not found["reading"]
            assert (found["here"]["title"], found["beside"]["title"], found["total"]) == ("now", "before", 2)
            assert {one["gain"] for one in found["prompts"]} == {0.5}
            answers = client.get("/dashboard/api/answers", params={"prompt_uid": "g0"}).json()
            assert [one["uid"] for one in answers] == ["g0-1", "g0-0"]
            assert client.get("/dashboard/api/answers", params={"prompt_uid": "g2"}).status_code == 404
        alone = dashboard_app(Dashboard(RunningPool(pool, "now")), DashboardLogin(None))
        with TestClient(alone) as client:
            answer = client.get("/dashboard/api/comparison")
            assert (answer.status_code, "--beside TARGET" in answer.text) == (400, True)


def test_the_parts_of_rewards_are_means_over_those_that_have_any() -> None:
    found = with_parts(run_of("a", {"p": [1.0]}), [{"format": 1.0}, {"format": 0.0, "speed": 0.5}, {}]).figures
    assert (found.parts, found.parts_of) == ({"format": 0.5, "speed": 0.25}, 2)
