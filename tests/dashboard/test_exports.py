"""What a filter shows, as files: what is in them, and where each row comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.testclient import TestClient
from tests.dashboard.test_follow import submit, sweep
from tests.rewards.recorded import record

from headrace import DataPool, Step
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.exports import ExportResult, check_format, write_export
from headrace.dashboard.follow import PoolFollower
from headrace.dashboard.index import TrajectoryIndex
from headrace.dashboard.login import DashboardLogin
from headrace.dashboard.records import TrajectoryQuery
from headrace.dashboard.routes import dashboard_app
from headrace.dashboard.source import JournalFolder, RunningPool
from headrace.data.errors import InvalidInput
from headrace.pool.export import read_steps
from headrace.rewards.recorded import SampleReader
from headrace.tokens import Renderer, load_renderer


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return load_renderer(folder)


def exported(
    pool: DataPool, path: Path, what: str, renderer: Renderer | None = None, **query: Any
) -> tuple[ExportResult, list[Any]]:
    """Exports what a query shows; what was said, and the rows of a file of lines."""
    index, source = TrajectoryIndex(), RunningPool(pool, "a pool of tests")
    sweep(PoolFollower(source, index))
    keys = index.keys(TrajectoryQuery(**query))
    reader = None if renderer is None else SampleReader(renderer)
    done = write_export(
        path, check_format(what), keys, source.trajectory, reader=reader, source=source.title, filters=query
    )
    return done, [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.suffix == ".jsonl" else []


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_steps_of_a_filter_come_back_as_they_were(tmp_path: Path, suffix: str) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool:
        for group in range(4):
            submit(pool, group)
        path = tmp_path / f"steps{suffix}"
        done, _ = exported(pool, path, f"steps{suffix}", tag="odd", min_reward=1.0)
        found = list(read_steps(path))
        assert (done.rows, done.trajectories) == (4, 2)
        assert [step.trajectory_uid for step in found] == ["g1-1", "g1-1", "g3-1", "g3-1"]
        assert [step.to_dict() for step in found[:2]] == [step.to_dict() for step in pool.trajectory("g1-1").steps]


def test_conversations_say_which_calls_they_are_of(tmp_path: Path, renderer: Renderer) -> None:
    with DataPool() as pool:
        record(pool, renderer, "t", [("2 + 2?", "4"), ("sure?", "yes")], prompt_uid="p")
        pool.curate("t", 1, tags=["good"], quality=0.5)
        pool.submit_steps([Step(prompt_ids=[5], response_ids=[6], trajectory_uid="bad", quarantined="drift")])
        done, rows = exported(pool, tmp_path / "sft.jsonl", "sft", renderer, min_version=0)
    assert (done.rows, done.trajectories) == (1, 2)
    talk = [(message["role"], message["content"]) for message in rows[0]["messages"]]
    assert talk[-4:] == [("user", "2 + 2?"), ("assistant", "4"), ("user", "sure?"), ("assistant", "yes")]
    about = rows[0]["provenance"]
    assert (about["trajectory_uid"], about["prompt_uid"], about["source"]) == ("t", "p", "a pool of tests")
    assert about["filter"] == {"min_version": 0}
    assert [step["step_index"] for step in about["steps"]] == [0, 1]
    assert (about["steps"][1]["tags"], about["steps"][1]["quality"]) == (["good"], 0.5)


def test_the_best_of_a_group_stands_against_its_worst(tmp_path: Path, renderer: Renderer) -> None:
    with DataPool(defaults={"n_rollouts": 3}) as pool:
        for uid, answer, reward in (("a", "5", 0.0), ("b", "4", 1.0), ("c", "four", 0.5)):
            record(pool, renderer, uid, [("2 + 2?", answer)], prompt_uid="p")
            pool.reward(uid, reward)
        for uid in ("d", "e"):
            record(pool, renderer, uid, [("again?", "no")], prompt_uid="equal")
            pool.reward(uid, 1.0)
        done, rows = exported(pool, tmp_path / "pairs.jsonl", "preferences", renderer)
    assert (done.rows, done.equal) == (1, 1)
    (row,) = rows
    assert row["prompt"][-1] == {"role": "user", "content": "2 + 2?"}
    assert [message["content"] for message in row["chosen"]] == ["4"]
    assert [message["content"] for message in row["rejected"]] == ["5"]
    assert row["provenance"]["chosen"]["trajectory_uid"] == "b"


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool:
        submit(pool, 0)
        pool.submit_steps([Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t")], channel="other")
        with pytest.raises(InvalidInput, match="one channel, and these are of other, train"):
            exported(pool, tmp_path / "x.jsonl", "steps.jsonl")
        with pytest.raises(InvalidInput, match="needs a tokenizer"):
            exported(pool, tmp_path / "x.jsonl", "sft")
    with pytest.raises(InvalidInput, match=r"one of steps\.jsonl, steps\.parquet"):
        check_format("csv")


def test_what_was_consumed_is_read_and_exported_from_a_journal(tmp_path: Path) -> None:
    with DataPool(tmp_path / "journal", durability="os", defaults={"n_rollouts": 2}) as pool:
        submit(pool, 0)
        pool.fetch_batch(1, timeout=0)
    source = JournalFolder(tmp_path / "journal")
    dashboard = Dashboard(source)
    with TestClient(dashboard_app(dashboard, DashboardLogin(None))) as client:
        assert client.portal is not None
        client.portal.call(dashboard.read_once)
        found = client.get("/dashboard/api/trajectory", params={"channel": "train", "uid": "g0-1"}).json()
        assert (found["trajectory"]["state"], found["total_steps"]) == ("consumed", 2)
        answer = client.get("/dashboard/api/export", params={"format": "steps.jsonl", "state": "consumed"})
        assert answer.headers["content-disposition"] == 'attachment; filename="headrace-steps.jsonl"'
        assert len(answer.content.splitlines()) == 4
        assert client.get("/dashboard/api/export", params={"format": "csv"}).status_code == 400
    source.close()
