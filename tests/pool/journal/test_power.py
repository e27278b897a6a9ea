"""The power fails: with `fsync` nothing acknowledged is lost, whatever became of what was not synced yet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.pool.journal.kit import check_rules, one, uids
from tests.pool.journal.power import PAGE, Disk, PowerFailure
from tests.pool.journal.victim import work

from headrace import DataPool
from headrace.pool import facts as f
from headrace.pool.journal import Journal
from headrace.pool.journal.files import MARK
from headrace.pool.journal.records import decode_commit
from headrace.pool.journal.scan import scan

Told = list[tuple[str, Any]]


class Lying(Disk):
    """A disk that says it has what it has not."""

    def sync(self, fd: int) -> None:
        self._work()


def run_until_the_power_fails(disk: Disk) -> Told:
    """What had been acknowledged by then."""
    told: Told = []
    try:
        work(disk.root / "runs" / "pool", "fsync", disk, lambda what, value: told.append((what, value)))
    except PowerFailure:
        pass
    disk.kill()
    return told


def lost(folder: Path, told: Told) -> set[str]:
    """What was acknowledged and is not there after a recovery."""
    with DataPool(folder) as pool:
        check_rules(pool._state)
        there, tombs = set(uids(pool)), set(pool._state.look("train").tombstones)
    kept = {uid for what, value in told if what == "kept" for uid in value}
    consumed = {uid for what, value in told if what == "consumed" for uid in value}
    forgotten = {value for what, value in told if what == "forgotten"}
    for submitted in [value for what, value in told if what == "trying"]:
        assert len({uid in there | tombs for uid in submitted}) == 1, "half of a submit is there"
    return (kept - there - tombs) | (consumed - tombs) | (forgotten & there)


def all_losses(tmp_path: Path, kind: type[Disk], outcomes: int) -> Iterator[set[str]]:
    """Fails the power at every operation. The first outcome each time: nothing that was not synced is there."""
    (tmp_path / "whole").mkdir()
    whole = kind(tmp_path / "whole")
    run_until_the_power_fails(whole)
    for at in range(1, whole.operations + 1):
        root = tmp_path / f"{at}"
        root.mkdir()
        disk = kind(root, fail_at=at)
        told = run_until_the_power_fails(disk)
        for outcome in range(outcomes):
            after = tmp_path / "after"
            disk.after_a_power_failure(after, random.Random(at * outcomes + outcome) if outcome else None)
            yield lost(after / "runs" / "pool", told)


@pytest.mark.parametrize("outcomes", [2, pytest.param(12, marks=pytest.mark.long)])
def test_a_power_failure_at_any_operation_loses_nothing_that_was_acknowledged(tmp_path: Path, outcomes: int) -> None:
    losses = list(all_losses(tmp_path, Disk, outcomes))
    assert len(losses) > 50 * outcomes
    assert not any(losses)


def test_on_a_disk_that_lies_the_same_failures_do_lose_something(tmp_path: Path) -> None:
    """So the test above can fail."""
    assert any(all_losses(tmp_path, Lying, 1))


@pytest.mark.parametrize(("durability", "left"), [("os", []), ("fsync", ["a"])])
def test_stats_say_what_an_acknowledgement_outlives(tmp_path: Path, durability: Any, left: list[str]) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root)
    pool = DataPool(root / "pool", durability=durability, files=disk)
    pool.submit_step(one("a"))
    assert pool.stats()["durability"] == durability
    disk.after_a_power_failure(tmp_path / "after")
    with DataPool(tmp_path / "after" / "pool") as pool:
        assert uids(pool) == left
    disk.kill()


def test_what_a_recovery_read_is_on_the_disk_before_it_is_answered_for(tmp_path: Path) -> None:
    """A process is killed between write and sync; the next one finds the step, and calls a retry a duplicate."""
    root = tmp_path / "disk"
    root.mkdir()
    disk = Disk(root)
    pool = DataPool(root / "pool", files=disk)
    pool.submit_step(one("a"))
    disk.fail_at = disk.operations + 2  # the write happens, the sync does not
    with pytest.raises(PowerFailure):
        pool.submit_step(one("b"))
    disk.kill()
    disk.fail_at = None
    pool = DataPool(root / "pool", files=disk)
    assert pool.submit_step(one("b")).duplicates == 1
    disk.kill()
    disk.after_a_power_failure(tmp_path / "after")
    with DataPool(tmp_path / "after" / "pool") as pool:
        assert uids(pool) == ["a", "b"]


def test_what_was_written_before_a_rotation_is_on_the_disk_before_the_next_segment(tmp_path: Path) -> None:
    """Of commits that nobody waits for yet, the later must not outlive the earlier in a segment of its own."""
    for at in range(1, 12):
        root = tmp_path / str(at)
        root.mkdir()
        disk = Disk(root)
        journal = Journal(root, files=disk)
        journal.open(lambda _: None)
        journal.append([f.Versioned("train", 1.0, 0)], None)
        disk.fail_at = disk.operations + at
        with suppress(PowerFailure):
            journal.rotate()
            journal.append([f.Versioned("train", 1.0, 1)], None)
        disk.kill()
        disk.after_a_power_failure(tmp_path / "after")
        versions, _ = recovered(tmp_path / "after")
        assert versions in ([], [0], [0, 1])


def written_together(folder: Path, n: int) -> list[tuple[int, int]]:
    """Commits of several callers, written before the first sync; where each begins and ends in the segment."""
    journal = Journal(folder)
    journal.open(lambda _: None)
    places = []
    for number in range(n):
        start = journal.bytes
        journal.append([f.Versioned("train", 1.0, number)], None)
        places.append((start, journal.bytes))
    journal.close()
    (folder / MARK).unlink()  # which names them: the power failed before that
    return places


def recovered(folder: Path) -> tuple[list[int], str | None]:
    """The versions that a recovery reads, and what it says of a torn tail."""
    found: list[int] = []
    journal = Journal(folder)
    journal.open(lambda frame: found.extend(fact.version for fact in decode_commit(frame)[0]))  # type: ignore[attr-defined]
    journal.close()
    return found, journal.torn


@pytest.mark.parametrize("lost_commit", [0, 1, 2])
def test_a_write_lost_before_later_ones_that_nobody_was_promised_is_a_torn_tail(
    tmp_path: Path, lost_commit: int
) -> None:
    """Pages reach the disk in any order: the second of two unsynced commits may be there without the first."""
    places = written_together(tmp_path, 4)
    segment = tmp_path / "000000000001.seg"
    data = bytearray(segment.read_bytes())
    start, end = places[lost_commit]
    data[start:end] = bytes(end - start)
    segment.write_bytes(data)
    versions, torn = recovered(tmp_path)
    assert versions == list(range(lost_commit))
    assert torn is not None
    assert f"bytes after byte {start} were cut off" in torn
    assert recovered(tmp_path) == (versions, None)


def test_a_write_lost_before_later_ones_is_damage_if_one_of_them_knows_that_it_was_promised(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open(lambda _: None)
    places = []
    for number in range(4):
        start = journal.bytes
        serial = journal.append([f.Cut("", 1.0, str(number) * 50_000)], None)
        places.append((start, journal.bytes))
        if number != 1:  # the second and the third are synced together
            journal.wait(serial)
    journal.close()
    segment = tmp_path / "000000000001.seg"
    data = segment.read_bytes()
    start, end = places[1]
    segment.write_bytes(data[:start] + data[end:])
    found: list[str] = []
    scanned = scan(tmp_path, lambda frame: found.extend(cut.detail for cut in decode_commit(frame)[0]), tolerant=True)  # type: ignore[attr-defined]
    assert [damage.why for damage in scanned.damage] == ["commits 2 to 2 are missing"]
    assert found == [number * 50_000 for number in "023"]


def test_pages_are_smaller_than_frames_so_that_frames_can_be_torn(tmp_path: Path) -> None:
    assert all(end - start > PAGE for start, end in written_together(tmp_path, 2))
