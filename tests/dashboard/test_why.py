"""What a journal alone tells of calls, trajectories, groups and batches."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from tests.dashboard.test_follow import submit

from headrace import DataPool, Step
from headrace.cli import main
from headrace.dashboard.consumption import HistoryKeeper, consumption
from headrace.dashboard.history import JournalHistory, read_history
from headrace.dashboard.source import JournalFolder, RunningPool
from headrace.dashboard.why import why
from headrace.pool.errors import NotFound


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def opened(folder: Path, clock: Clock, **options: int) -> DataPool:
    return DataPool(folder, durability="os", defaults={"n_rollouts": 2, **options}, clock=clock)


def said(history: JournalHistory, name: str) -> str:
    (found,) = why(history, name)
    return found.verdict


def test_a_trajectory_is_followed_through_a_lease_that_runs_out_to_the_batch_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    clock = Clock()
    with opened(tmp_path, clock) as pool:
        submit(pool, 0)
        first = pool.fetch_batch(1, lease_s=10.0, timeout=0)
        assert first is not None
        history = read_history(tmp_path)
        assert said(history, "g0-0") == "It is with a trainer, in batch 1, which has not been acknowledged yet."
        clock.now += 60.0
        second = pool.fetch_batch(1, lease_s=10.0, timeout=0)
        assert second is not None
        second.ack()
        history = read_history(tmp_path)
    (found,) = why(history, "g0-0")
    assert found.verdict == "It was trained on: batch 2 was acknowledged."
    assert [line.words.partition(":")[0] for line in found.lines] == [
        "step 0 of g0-0",
        "step 1 of g0-0",
        f"handed out in batch 1 (lease {first.lease_id})",
        "came back from batch 1",
        f"handed out in batch 2 (lease {second.lease_id})",
        "the trainer acknowledged batch 2",
    ]
    assert [(batch.state, batch.again) for batch in history.batches] == [("expired", 0), ("acked", 1)]
    (batch,) = why(history, str(second.lease_id))
    assert {line.trajectory for line in batch.lines} == {"g0-0", "g0-1"}
    assert len(batch.lines) == 4


def test_a_call_leads_to_its_step_and_to_what_became_of_it(tmp_path: Path) -> None:
    with opened(tmp_path, Clock(), n_rollouts=1) as pool:
        for uid, quarantined in (("good", None), ("bad", "ids do not decode")):
            pool.submit_steps(
                [
                    Step(
                        prompt_ids=[1],
                        response_ids=[2],
                        trajectory_uid=uid,
                        step_index=index,
                        call_id=f"call-{uid}-{index}",
                        quarantined=quarantined if index == 0 else None,
                        is_last=index == 1,
                    )
                    for index in range(2)
                ]
            )
        pool.curate("good", 0, trainable=False)
        pool.fetch_batch(2, timeout=0)
        history = read_history(tmp_path)
    assert said(history, "call-good-1").startswith("It was trained on: batch 1 was handed out for good.")
    assert said(history, "call-good-0").startswith("Its step may not be trained on; the trajectory's others may.")
    assert said(history, "call-bad-0") == "It was not trained on: its step is quarantined (ids do not decode)."
    (found,) = why(history, "call-good-1")
    assert (found.lines[0].trajectory, found.lines[0].step) == ("good", 1)
    assert "step 0 was curated: it may not be trained on" in [line.words for line in why(history, "good")[0].lines]
    with pytest.raises(NotFound, match="no trajectory, call, prompt, lease or batch 'nobody'"):
        why(history, "nobody")


def test_what_was_not_trained_on_says_why(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock, max_queue_size=2) as pool:
        for group in range(3):
            submit(pool, group)
        submit(pool, 3, ended=False)
        pool.fail("g3-0", "it crashed")
        submit(pool, 4, rollouts=1)
        pool.fetch_batch(1, timeout=0)
        history = read_history(tmp_path)
        states = {one.uid: one.state for one in history.trajectories.values()}
        known = {row["trajectory_uid"]: row["state"] for row in pool.trajectory_states(sorted(states))}
    assert states == known
    assert "`max_queue_size`" in said(history, "g0-0")
    assert said(history, "g3-0") == "It was not trained on: it failed (it crashed)."
    assert said(history, "g4-0") == "It waits: 1 of the 2 trajectories of its group are complete."


def test_of_what_was_compacted_away_the_end_is_still_told(tmp_path: Path) -> None:
    with opened(tmp_path, Clock()) as pool:
        for group in range(3):
            submit(pool, group)
        pool.fetch_batch(1, timeout=0)
        leased = pool.fetch_batch(1, lease_s=60.0, timeout=0)
        assert leased is not None
        pool.compact()
        leased.ack()
        history = read_history(tmp_path)
    assert "the journal has been compacted since" in said(history, "g0-0")
    assert said(history, "g1-0") == "It was trained on: batch 1 was acknowledged."
    assert said(history, "g2-0").startswith("It waits for a trainer")
    assert "compacted" in why(history, "g2-1")[0].lines[0].words


def test_steps_that_go_out_one_by_one(tmp_path: Path) -> None:
    with opened(tmp_path, Clock(), n_rollouts=1) as pool:
        submit(pool, 0, rollouts=1, steps=3)
        batch = pool.fetch_batch(2, unit="step", lease_s=60.0, timeout=0)
        assert batch is not None
        batch.ack()
        history = read_history(tmp_path)
        (found,) = history.of_trajectory("g0-0")
        assert sorted(step.state for step in found.steps.values()) == ["consumed", "consumed", "queued"]
        pool.fetch_batch(1, unit="step", timeout=0)
        (found,) = read_history(tmp_path).of_trajectory("g0-0")
        assert found.state == "consumed"


def test_the_command_answers_in_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(tmp_path / "journal", Clock()) as pool:
        submit(pool, 0)
        pool.fetch_batch(1, timeout=0)
        with pytest.raises(SystemExit) as ended:
            main(["why", "g0-1", str(tmp_path)])
        assert ended.value.code in (None, 0)
        text = capsys.readouterr().out
        assert "trajectory g0-1 (channel train)\n  It was trained on: batch 1" in text
        with pytest.raises(SystemExit):
            main(["why", "g0", str(tmp_path / "journal"), "--json"])
        (found,) = orjson.loads(capsys.readouterr().out)
        assert (found["kind"], len(found["lines"])) == ("group", 2)
        with pytest.raises(SystemExit) as ended:
            main(["why", "g0", "http://127.0.0.1:1"])
        assert ended.value.code == 2


def test_batches_are_listed_newest_first_and_read_again_when_the_journal_changed(tmp_path: Path) -> None:
    clock = Clock()
    with opened(tmp_path, clock) as pool:
        for group in range(4):
            submit(pool, group)
        pool.fetch_batch(1, timeout=0)
        leased = pool.fetch_batch(2, lease_s=60.0, timeout=0)
        assert leased is not None
        keeper = HistoryKeeper(RunningPool(pool, "here"), clock=lambda: 0.0, sleep=lambda _: None)
        page = consumption(keeper.get(), 0, 50, events=[], read_at=keeper.read_at)
        assert [(row.number, row.state, row.groups, row.trajectories, row.steps) for row in page.rows] == [
            (2, "leased", 2, 4, 8),
            (1, "consumed", 1, 2, 4),
        ]
        assert page.rows[0].reward == 0.5
        assert page.rows[0].versions == (3, 3)
        leased.nack()
        pool.fetch_batch(2, timeout=0)
        page = consumption(keeper.get(), 0, 1, events=[], read_at=keeper.read_at)
        assert (page.total, page.redelivered, page.states) == (3, 2, {"consumed": 2, "nack": 1})
        assert [row.number for row in page.rows] == [3]


def test_a_pool_without_a_journal_tells_what_it_noted(tmp_path: Path) -> None:
    with DataPool(defaults={"n_rollouts": 2}) as pool:
        submit(pool, 0, ended=False)
        pool.fail("g0-0", "it crashed")
        source = RunningPool(pool, "here")
        assert HistoryKeeper(source).get() is None
        page = consumption(None, 0, 50, events=source.events(), read_at=None)
    assert not page.journal
    assert "failed" in [event["kind"] for event in page.events]


def test_a_journals_folder_is_its_own_journal(tmp_path: Path) -> None:
    with opened(tmp_path, Clock()) as pool:
        submit(pool, 0)
    source = JournalFolder(tmp_path)
    assert source.journal == tmp_path
    source.close()
