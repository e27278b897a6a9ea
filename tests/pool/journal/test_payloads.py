"""A pool larger than memory: payloads beyond `memory_mb` lie in the journal, and come back as they were, or not."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.pool.journal.kit import Unsynced, check_rules, dump, one, same, uids
from tests.pool.journal.power import Disk, PowerFailure
from tests.pool.kit import SOON
from tests.pool.scored.kit import started

from headrace import DataPool, Step
from headrace.data.block import Record
from headrace.data.errors import InvalidInput
from headrace.data.scored import decode
from headrace.pool.batch import Batch
from headrace.pool.config import Limits
from headrace.pool.errors import Conflict, JournalDamaged, JournalError
from headrace.pool.export import export, read_steps
from headrace.pool.journal import payloads
from headrace.pool.journal.payloads import ArraysInFile, PayloadFile, PayloadFiles
from headrace.pool.journal.repair import repair
from headrace.pool.readonly import JournalView

#: MB of a few steps of these tests: the first ones fit.
LITTLE = 0.001


def opened(folder: Path, memory_mb: float | None = 0, **options: Any) -> DataPool:
    options.setdefault("files", Unsynced())
    return DataPool(folder, durability="os", limits=Limits(memory_mb=memory_mb), **options)


def turns(uid: str, n: int = 3, prompt: str | None = None) -> list[Step]:
    """A trajectory whose every turn says all that was said before, with an image on the last."""
    said: list[int] = [1, 2, 3]
    steps = []
    for index in range(n):
        image = {"image": uid.encode() * 30} if index == n - 1 else None
        step = one(uid, prompt, index, last=index == n - 1, size=4, prompt_ids=list(said), multi_modal_data=image)
        said += [*step.response_ids.tolist(), 7]
        steps.append(step)
    return steps


def told(steps: list[Step]) -> list[Any]:
    """What a step is, as plain values."""
    return [
        (
            step.trajectory_uid,
            step.step_index,
            step.prompt_ids.tolist(),
            step.response_ids.tolist(),
            step.rollout_log_probs.tolist() if step.rollout_log_probs is not None else None,
            step.multi_modal_data,
            step.reward,
        )
        for step in steps
    ]


def records(pool: DataPool, channel: str = "train") -> Iterator[Record]:
    for trajectory in pool._state.channels[channel].trajectories.values():
        yield from trajectory.tree.records.values()


def files_of(pool: DataPool) -> set[str]:
    """The files that steps lie in."""
    return {record.stored.file.path.name for record in records(pool) if isinstance(record.stored, ArraysInFile)}


def damage(pool: DataPool, uid: str) -> Path:
    """Turns a bit of a trajectory's first step over, in the file that it lies in."""
    record = pool._state.channels["train"].trajectories[uid].tree.records[0]
    assert isinstance(record.stored, ArraysInFile)
    path, at = record.stored.file.path, record.stored.ranges(record.head)[0][0]
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    os.close(fd)
    return path


@pytest.mark.parametrize("memory_mb", [0, LITTLE])
def test_what_is_handed_out_is_what_came_in(tmp_path: Path, memory_mb: float) -> None:
    with opened(tmp_path / "pool", memory_mb) as pool, DataPool() as other:
        for number in range(8):
            for each in (pool, other):
                for step in turns(f"t{number}"):
                    each.submit_step(step)
        assert pool.stats()["in_journal_bytes"] > 0
        assert pool.stats()["memory_bytes"] <= memory_mb * 1e6
        assert other.stats()["in_journal_bytes"] == 0
        assert told(pool.trajectory("t7").steps) == told(other.trajectory("t7").steps)
        calls: list[dict[str, Any]] = [
            {"batch_size": 2},
            {"batch_size": 1, "order": "latest", "lease_s": 60, "request_id": "r/1"},
            {"batch_size": 1, "request_id": "r/1"},
            {"batch_size": 3, "unit": "step"},
            {"batch_size": 2, "lease_s": 60},
        ]
        for call in calls:
            batches = [each.fetch_batch(**call, timeout=0) for each in (pool, other)]
            assert told(batches[0].steps) == told(batches[1].steps)
            check_rules(pool._state)
        assert dump(pool._state)["channels"]["train"]["tombs"] == dump(other._state)["channels"]["train"]["tombs"]


def test_payloads_stay_in_the_journal_after_an_answer_was_made(tmp_path: Path) -> None:
    with opened(tmp_path / "pool") as pool:
        pool.submit_steps(turns("t"))
        batch = pool.fetch_batch(1, timeout=0, lease_s=60)
        assert pool.trajectory("t").steps
        assert all(record.ids_in_memory is None for record in records(pool))
        batch.nack()
        assert told(pool.fetch_batch(1, timeout=0).steps) == told(turns("t"))


def test_the_awaitable_calls_read_them_too(tmp_path: Path) -> None:
    async def story(pool: DataPool) -> list[Step]:
        await pool.aio.submit_steps(turns("a"))
        await pool.aio.submit_steps(turns("b"))
        assert told((await pool.aio.trajectory("a")).steps) == told(turns("a"))
        batch: Batch | None = await pool.aio.fetch_batch(2)
        assert batch is not None
        return batch.steps

    with opened(tmp_path / "pool") as pool:
        assert told(asyncio.run(story(pool))) == told([*turns("a"), *turns("b")])
        check_rules(pool._state)


def test_they_are_read_while_a_backup_keeps_many_deletions_waiting(tmp_path: Path) -> None:
    forgotten = [f"f{number}" for number in range(64)]  # more than the event loop has threads of its own

    async def story(pool: DataPool) -> list[Step]:
        await pool.aio.submit_steps(turns("kept"))
        await pool.aio.submit_steps([step for uid in forgotten for step in turns(uid, 1, uid)])
        with pool._compacting:  # as a backup has it for as long as it copies
            deletions = [asyncio.create_task(pool.aio.forget(uid)) for uid in forgotten]
            while any(row["state"] != "forgotten" for row in pool.trajectory_states(forgotten)):
                await asyncio.sleep(0)
            async with asyncio.timeout(SOON):
                batch: Batch | None = await pool.aio.fetch_batch(1)
            assert not any(deletion.done() for deletion in deletions)
        await asyncio.gather(*deletions)
        assert batch is not None
        return batch.steps

    with opened(tmp_path / "pool", defaults={"n_rollouts": 1}) as pool:
        assert told(asyncio.run(story(pool))) == told(turns("kept"))


def noted_readings(pool: DataPool, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each reading of a payload from now on, whether everybody else had to wait for it."""
    found: list[bool] = []
    read = PayloadFile.read

    def noting(self: PayloadFile, at: int, size: int) -> bytes:
        found.append(pool._lock.locked())
        return read(self, at, size)

    monkeypatch.setattr(PayloadFile, "read", noting)
    return found


def test_nobody_waits_while_a_submit_reads_what_it_is_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "pool") as pool:
        first, second, third = turns("t")
        pool.submit_step(first)
        held = noted_readings(pool, monkeypatch)
        pool.submit_step(second)  # its prompt is looked for among what is there
        assert pool.submit_steps([first, second]).duplicates == 2
        assert held
        assert not any(held)
        held.clear()
        kept = len(second.prompt_ids) + len(second.response_ids)
        rest: dict[str, Any] = {"prompt_ids": third.prompt_ids[kept:], "builds_on": (1, kept)}
        pool.submit_step(one("t", index=2, size=4, multi_modal_data=third.multi_modal_data, **rest))
        assert held == [], "who says what a step builds on has nothing read"
        assert told(pool.trajectory("t").steps) == told(turns("t"))


def test_nobody_waits_while_a_batch_of_what_agents_recorded_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "pool") as pool:
        started(pool, batch_size=3)
        pool.desk_serve("train")
        for uid in "abcd":
            pool.submit_steps(turns(uid))
        held = noted_readings(pool, monkeypatch)
        batch = pool.desk_batch()
        assert batch is not None
        whole = [[*steps[-1].prompt_ids, *steps[-1].response_ids] for steps in map(turns, "abc")]
        assert [decode(found)["tokens"] for found in batch.pieces] == [[tokens] for tokens in whole]
        assert held
        assert not any(held)


def test_a_retry_is_compared_with_what_lies_in_the_journal(tmp_path: Path) -> None:
    with opened(tmp_path / "pool") as pool:
        pool.submit_steps(turns("t"))
        assert pool.submit_steps(turns("t")).duplicates == 3
        with pytest.raises(Conflict):
            pool.submit_step(one("t", index=0, last=False, size=4, prompt_ids=[1, 2, 4]))
        pool.fetch_batch(1, timeout=0)
        assert pool.submit_steps(turns("t")).duplicates == 3, "what it left behind tells a retry as well"


def test_a_token_that_steps_share_is_written_once_wherever_it_is(tmp_path: Path) -> None:
    sizes = []
    for memory_mb in (0, 64):
        with opened(tmp_path / str(memory_mb), memory_mb) as pool:
            for step in turns("t", 12):
                pool.submit_step(step)
            sizes.append(pool.stats()["journal_bytes"])
            bytes_kept = pool._state.memory.used + pool._state.memory.in_journal
            assert bytes_kept == 4 * (3 + 12 * 5 - 1) + 4 * 4 * 12 + 30
    assert sizes[0] == sizes[1]


# -- files that come and go ------------------------------------------------------------------------------------------


def test_a_restart_finds_them_where_they_lie(tmp_path: Path) -> None:
    with opened(tmp_path / "pool", segment_mb=0.001) as pool:
        for number in range(9):
            pool.submit_steps(turns(f"t{number}"))
        before = dump(pool._state)
        assert len(files_of(pool)) > 3
    for memory_mb in (0, LITTLE, 64):
        with opened(tmp_path / "pool", memory_mb) as pool:
            assert same(before, dump(pool._state))
            check_rules(pool._state)
            assert (memory_mb == 64) == (not files_of(pool))


def test_a_snapshot_takes_payloads_along_and_only_then_their_segments_go(tmp_path: Path) -> None:
    with opened(tmp_path / "pool", segment_mb=0.001) as pool:
        for number in range(9):
            pool.submit_steps(turns(f"t{number}"))
        before = dump(pool._state)
        for _ in range(2):  # the second takes the place of a snapshot of the same number
            pool.compact()
            assert files_of(pool) == {path.name for path in (tmp_path / "pool").glob("*.snap")}
            assert same(before, dump(pool._state))
        pool.submit_steps(turns("after"))
        assert len(files_of(pool)) == 2
        assert told(pool.fetch_batch(10, timeout=0).steps[:3]) == told(turns("t0"))


def test_who_reads_while_a_snapshot_takes_a_segments_place_still_finds_it(tmp_path: Path) -> None:
    with opened(tmp_path / "pool") as pool:
        pool.submit_steps(turns("t"))
        taken = [(record.stored, record.head, record.arrays()) for record in records(pool)]
        pool.compact()
        assert {path.name for path in (tmp_path / "pool").glob("0*")} == {"000000000002.seg", "000000000002.snap"}
        assert {stored.file.path.name for stored, _, _ in taken} == {"000000000001.seg"}
        for stored, head, arrays in taken:
            assert stored.read(head) == arrays


def test_a_compaction_that_fails_leaves_payloads_where_they_are(tmp_path: Path) -> None:
    class Full(Unsynced):
        refuse = False

        def rename(self, old: Path, new: Path) -> None:
            if self.refuse:
                raise OSError("no")
            super().rename(old, new)

    files = Full()
    with opened(tmp_path / "pool", files=files) as pool:
        pool.submit_steps(turns("t"))
        before = files_of(pool)
        files.refuse = True
        with pytest.raises(JournalError):
            pool.compact()
        assert files_of(pool) == before
        assert told(pool.fetch_batch(1, timeout=0).steps) == told(turns("t"))


def test_more_files_than_may_be_open_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "OPEN_FILES", 2)
    with opened(tmp_path / "pool", segment_mb=0.0005) as pool:
        for number in range(9):
            pool.submit_steps(turns(f"t{number}"))
        before = len(os.listdir("/proc/self/fd"))
        assert len(files_of(pool)) > 5
        for _ in range(2):
            assert all(told(pool.trajectory(f"t{number}").steps) == told(turns(f"t{number}")) for number in range(9))
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_forgotten_trajectory_is_gone_from_the_files(tmp_path: Path) -> None:
    with opened(tmp_path / "pool") as pool:
        pool.submit_steps(turns("keep"))
        pool.submit_steps(turns("gone"))
        image = b"gone" * 30
        assert any(image in path.read_bytes() for path in (tmp_path / "pool").glob("0*"))
        pool.forget("gone")
        assert not any(image in path.read_bytes() for path in (tmp_path / "pool").glob("0*"))
        assert told(pool.trajectory("keep").steps) == told(turns("keep"))


# -- readers beside the pool -----------------------------------------------------------------------------------------


def test_a_view_and_an_export_read_a_journal_larger_than_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "pool", segment_mb=0.001) as pool:
        for number in range(5):
            pool.submit_steps(turns(f"t{number}"))
    monkeypatch.setattr("headrace.pool.readonly.DEFAULT_MEMORY_MB", LITTLE / 10)
    with JournalView(tmp_path / "pool") as view:
        assert view.stats()["in_journal_bytes"] > 0
        export(view, tmp_path / "steps.jsonl")
    wanted = [step for number in range(5) for step in turns(f"t{number}")]
    found = told(list(read_steps(tmp_path / "steps.jsonl")))
    assert [each[:4] for each in found] == [each[:4] for each in told(wanted)]


def test_a_view_of_a_journal_in_use_outlives_its_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.pool.readonly.DEFAULT_MEMORY_MB", 0)
    with opened(tmp_path / "pool", segment_mb=0.001) as pool:
        for number in range(5):
            pool.submit_steps(turns(f"t{number}"))
        with JournalView(tmp_path / "pool", live=True) as view:
            pool.fetch_batch(5, timeout=0)
            pool.compact()
            assert told(view.trajectory("t3").steps) == told(turns("t3"))


# -- damage --------------------------------------------------------------------------------------------------------


def test_a_damaged_payload_is_named_and_never_handed_out(tmp_path: Path) -> None:
    with opened(tmp_path / "pool") as pool:
        for uid in ("a", "b", "c"):
            pool.submit_steps(turns(uid))
        path = damage(pool, "b")
        before = dump_but_steps(pool)
        named = f"{path} is damaged in bytes .* does not match its CRC32C"
        for call in (
            lambda: pool.fetch_batch(2, timeout=0),
            lambda: pool.fetch_batch(3, timeout=0, lease_s=60),
            lambda: pool.fetch_batch(6, timeout=0, unit="step"),
            lambda: pool.trajectory("b"),
            pool.compact,
        ):
            with pytest.raises(JournalDamaged, match=named):
                call()
            assert same(before, dump_but_steps(pool))
        assert told(pool.fetch_batch(1, timeout=0).steps) == told(turns("a")), "what is sound goes on"
    with pytest.raises(JournalDamaged, match=path.name):
        opened(tmp_path / "pool")
    repair(tmp_path / "pool")
    with opened(tmp_path / "pool") as pool:
        assert uids(pool) == ["c"]
        assert pool.stats("train")["ledger"]["dropped"] == {"damaged": 3}


def dump_but_steps(pool: DataPool) -> dict[str, Any]:
    stats = pool.stats()
    return {"ledger": stats["ledger"], "groups": stats["channels"]["train"]["groups"], "uids": uids(pool)}


def test_a_payload_whose_file_ends_before_it_is_damage(tmp_path: Path) -> None:
    file = tmp_path / "000000000001.seg"
    file.write_bytes(b"short")
    with pytest.raises(JournalDamaged, match=r"it ends before byte 12, and a payload of 10 bytes begins at byte 2"):
        PayloadFiles().file(file).read(2, 10)
    with pytest.raises(JournalError, match="cannot be read"):
        PayloadFiles().file(tmp_path / "gone").read(0, 1)


# -- the bound -----------------------------------------------------------------------------------------------------


def test_without_a_journal_a_bound_that_nothing_can_keep_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"memory_mb is 64, and the pool has no journal .* max_queue_size"):
        DataPool(limits=Limits(memory_mb=64))


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "64"])
def test_a_bound_that_makes_no_sense_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match="memory_mb must be a number of at least 0, or none"):
        Limits(memory_mb=value)


def test_a_blob_that_steps_share_is_counted_once_and_freed_with_the_last_of_them(tmp_path: Path) -> None:
    with opened(tmp_path / "pool", 64, defaults={"replies_kept": 0}) as pool:
        for uid in ("a", "b"):
            pool.submit_step(one(uid, multi_modal_data={"image": b"cat" * 100}))
        arrays = sum(record.array_bytes for record in records(pool))
        assert pool._state.memory.used == arrays + 300
        pool.fetch_batch(1, timeout=0)
        assert pool._state.memory.used == arrays // 2 + 300
        pool.fetch_batch(1, timeout=0)
        assert pool._state.memory.used == 0


# -- the power fails ---------------------------------------------------------------------------------------------------


def work(disk: Disk, acknowledged: dict[str, str]) -> None:
    """Submits, hand-outs and compactions of a pool that keeps no payload in memory."""
    limits = Limits(memory_mb=0)
    pool = DataPool(disk.root / "pool", files=disk, segment_mb=0.001, limits=limits)

    def submit(uid: str) -> None:
        pool.submit_steps(turns(uid))
        acknowledged[uid] = "kept"

    for number in range(4):
        submit(f"a{number}")
    pool.compact()
    batch = pool.fetch_batch(1, timeout=0)
    acknowledged[batch.groups[0].trajectories[0].uid] = "consumed"
    submit("b")
    pool.compact()
    submit("c")
    pool.close()


def test_a_power_failure_at_any_operation_loses_no_payload(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = Disk(tmp_path / "whole")
    work(whole, {})
    for at in range(1, whole.operations + 1):
        root = tmp_path / str(at)
        root.mkdir()
        disk = Disk(root, fail_at=at)
        acknowledged: dict[str, str] = {}
        with pytest.raises(PowerFailure):
            work(disk, acknowledged)
        disk.kill()
        for outcome in (None, random.Random(at)):
            disk.after_a_power_failure(tmp_path / "after", outcome)
            with opened(tmp_path / "after" / "pool", files=None) as pool:
                check_rules(pool._state)
                for uid, state in acknowledged.items():
                    if state == "consumed":
                        assert uid in pool._state.look("train").tombstones
                    elif uid in pool._state.look("train").trajectories:
                        assert told(pool.trajectory(uid).steps) == told(turns(uid))
                    else:
                        assert uid in pool._state.look("train").tombstones
