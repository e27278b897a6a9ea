"""A journal at rest, read without a pool: the same answers, and nothing changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace import DataPool, Step
from headrace.pool.errors import JournalDamaged, JournalLocked, NotFound, PoolError
from headrace.pool.readonly import JournalView


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    with DataPool(tmp_path / "journal", durability="os") as pool:
        for n in range(3):
            pool.submit_step(
                Step(prompt_ids=[1, 2], response_ids=[n], trajectory_uid=f"t{n}", step_index=0, is_last=True)
            )
        pool.fetch_batch(1, lease_s=3600)
    return tmp_path / "journal"


def test_a_view_answers_as_the_pool_would(journal: Path) -> None:
    with JournalView(journal) as view:
        seen = (view.stats("train")["ledger"], view.list_trajectories(), view.trajectory("t1").steps, view.events())
    with DataPool(journal, durability="os") as pool:
        there = (pool.stats("train")["ledger"], pool.list_trajectories(), pool.trajectory("t1").steps, pool.events())
    assert seen == there


async def test_a_view_has_awaitable_twins(journal: Path) -> None:
    with JournalView(journal) as view:
        assert await view.aio.stats() == view.stats()
        with pytest.raises(PoolError, match="'fetch' changes a pool"):
            await view.aio.fetch_batch(1, timeout=0)


def test_what_would_change_the_pool_is_refused(journal: Path) -> None:
    with JournalView(journal) as view:
        for call in (
            lambda: view.fetch_batch(1, timeout=0),
            lambda: view.complete("t1"),
            lambda: view.forget("t1"),
            lambda: view.configure("train", n_rollouts=2),
            view.compact,
        ):
            with pytest.raises(PoolError, match="changes a pool, and this one is only read"):
                call()
        assert view.stats("train")["ledger"]["queued"] == 2


def test_two_may_read_at_once_but_no_pool_opens_meanwhile(journal: Path) -> None:
    with JournalView(journal), JournalView(journal) as second:
        assert second.stats()["balanced"]
        with pytest.raises(JournalLocked):
            DataPool(journal)
    with DataPool(journal), pytest.raises(JournalLocked, match=f"is open in process {os.getpid()}; connect"):
        JournalView(journal)


def test_reading_touches_no_file(journal: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in journal.iterdir()}
    with JournalView(journal) as view:
        assert view.stats()["ledger"]["submitted"] == 3
    assert {path.name: path.stat().st_mtime_ns for path in journal.iterdir()} == before


def test_damage_is_an_error_that_saves_nothing_by_itself(journal: Path) -> None:
    segment = min(journal.glob("*.seg"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 3] ^= 0x10
    segment.write_bytes(data)
    names = sorted(path.name for path in journal.iterdir())
    with pytest.raises(JournalDamaged, match=rf"{segment.name}.*headrace pool repair"):
        JournalView(journal)
    assert sorted(path.name for path in journal.iterdir()) == names
    with pytest.raises(JournalDamaged):  # and the lock was let go of
        DataPool(journal)


def test_a_folder_without_a_journal_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no such folder"):
        JournalView(tmp_path / "none")
    with pytest.raises(NotFound, match="it holds no segment and no snapshot"):
        JournalView(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_journal_that_a_pool_has_open_can_be_read_live(journal: Path) -> None:
    with DataPool(journal, durability="os") as pool:
        with JournalView(journal, live=True) as view:
            assert view.stats("train")["ledger"] == pool.stats("train")["ledger"]
            pool.submit_step(Step(prompt_ids=[1], response_ids=[9], trajectory_uid="new", step_index=0, is_last=True))
            with pytest.raises(NotFound):
                view.trajectory("new")  # as it was when it was read
        pool.compact()
        with JournalView(journal, live=True) as view:
            assert view.trajectory("new").steps == pool.trajectory("new").steps
            with pytest.raises(PoolError, match="changes a pool"):
                view.complete("new")


def test_what_was_consumed_can_be_read_too(journal: Path) -> None:
    with DataPool(journal, durability="os") as pool:
        pool.reward("t1", 0.5)
        batch = pool.fetch_batch(2)
        assert batch is not None
        with JournalView(journal, live=True, consumed=True) as view:
            found = list(view.consumed("train"))
            assert [(each.uid, each.reward, each.state) for each in found] == [
                ("t1", 0.5, "consumed"),
                ("t2", None, "consumed"),
            ]
            assert found[0].steps == batch.groups[0].trajectories[0].steps
            assert view.stats("train")["ledger"] == pool.stats("train")["ledger"]
        with JournalView(journal, live=True) as view:
            assert list(view.consumed("train")) == []
