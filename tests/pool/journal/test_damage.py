"""Journals that do not read back: a torn tail is cut off, damage is an error, and both are said."""

from __future__ import annotations

import errno
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.pool.journal.kit import Crashing, Unsynced, check_rules, flip, frames, one, segment, uids

from headrace import DataPool
from headrace.data import frame
from headrace.data.frame import FrameKind, frame_bytes
from headrace.pool.apply import apply
from headrace.pool.config import ChannelConfig, Durability, Limits
from headrace.pool.errors import JournalDamaged, JournalError
from headrace.pool.journal import records
from headrace.pool.journal.files import MARK, read_watermark, snapshot_path
from headrace.pool.journal.repair import repair, verify
from headrace.pool.journal.scan import scan
from headrace.pool.readonly import JournalView
from headrace.pool.state import State

STEPS = ["a", "b", "c", "d"]


def opened(folder: Path) -> DataPool:
    return DataPool(folder, durability="os", files=Unsynced())


def journal(folder: Path, names: list[str] = STEPS, size: int = 2) -> Path:
    """A journal with a commit for each of the steps; the first also holds its channel's options."""
    with opened(folder) as pool:
        for name in names:
            pool.submit_step(one(name, size=size))
    return folder


def in_segments(folder: Path, names: list[str] = STEPS) -> Path:
    """The same, with a segment for each."""
    with DataPool(folder, durability="os", files=Unsynced(), segment_mb=0.0001) as pool:
        for name in names:
            pool.submit_step(one(name))
    assert len(list(folder.glob("*.seg"))) == len(names)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("0*"))}


def refused(folder: Path) -> str:
    """What opening a damaged journal says. It changes nothing, and saves what reads back as a journal of its own."""
    before = content(folder)
    with pytest.raises(JournalDamaged) as raised:
        opened(folder)
    assert content(folder) == before
    message = str(raised.value)
    assert f"saved in {folder / 'saved'}" in message
    assert f"headrace pool repair {folder}" in message
    return message


def repaired(folder: Path) -> list[str]:
    """What is left after a repair, which agrees with what opening the journal had saved."""
    with opened(folder / "saved") as pool:
        saved = uids(pool)
        check_rules(pool._state)
    before = content(folder)
    assert repair(folder).damage
    assert not verify(folder).damage
    kept = next((folder / "damaged").iterdir())
    assert content(kept) == before
    assert not (folder / "saved").exists()
    with opened(folder) as pool:
        check_rules(pool._state)
        assert uids(pool) == saved
        assert pool.submit_step(one("new")).accepted == 1
    with opened(folder) as pool:
        assert uids(pool) == [*saved, "new"]
    return saved


# -- a torn tail -------------------------------------------------------------------------------------------------------


def test_a_last_record_cut_at_any_byte_is_cut_off_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = segment(journal(tmp_path / "model")).read_bytes()
    start, end = frames(segment(tmp_path / "model"))[-1]
    assert end == len(model)
    for size in range(start + 1, end):
        folder = tmp_path / str(size)
        folder.mkdir()
        segment(folder).write_bytes(model[:size])
        caplog.clear()
        with opened(folder) as pool:
            assert uids(pool) == ["a", "b", "c"]
            said = f"000000000001.seg: {size - start} bytes after byte {start} were cut off (frame cut short"
            assert said in caplog.text
            assert [event.kind for event in pool.events()] == ["journal_cut"]
            assert said in pool.events()[0].detail["detail"]
            assert pool.submit_step(one("d")).accepted == 1
            check_rules(pool._state)
        torn = folder / f"000000000001-{start}.torn"
        assert torn.exists() == bool(model[start:size].strip(b"\0"))
        assert not torn.exists() or torn.read_bytes() == model[start:size]
        with opened(folder) as pool:
            assert uids(pool) == STEPS


def test_a_whole_journal_says_nothing_of_a_tail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal(tmp_path)
    caplog.set_level(logging.WARNING)
    with opened(tmp_path) as pool:
        assert uids(pool) == STEPS
        assert pool.events() == []
    assert caplog.text == ""


@pytest.mark.parametrize("n", [1, 40, 100_000])
def test_a_tail_of_zeros_is_cut_off_and_not_kept(tmp_path: Path, n: int) -> None:
    size = segment(journal(tmp_path)).stat().st_size
    with segment(tmp_path).open("ab") as file:
        file.write(bytes(n))
    with opened(tmp_path) as pool:
        assert uids(pool) == STEPS
        assert f"{n} bytes after byte {size} were cut off" in pool.events()[0].detail["detail"]
    assert not list(tmp_path.glob("*.torn"))


def test_a_last_record_that_became_zeros_is_cut_off(tmp_path: Path) -> None:
    journal(tmp_path)
    start, end = frames(segment(tmp_path))[-1]
    data = segment(tmp_path).read_bytes()
    segment(tmp_path).write_bytes(data[:start] + bytes(end - start))
    (tmp_path / MARK).unlink()
    with opened(tmp_path) as pool:
        assert uids(pool) == ["a", "b", "c"]


def test_the_cut_is_told_to_later_readers_under_the_same_cursor(tmp_path: Path) -> None:
    journal(tmp_path)
    with segment(tmp_path).open("ab") as file:
        file.write(b"x")
    with opened(tmp_path) as pool:
        pool.set_version(1)
        told = pool.events()
    with opened(tmp_path) as pool:
        assert pool.events() == told
        assert [event.kind for event in told] == ["journal_cut", "version"]


@pytest.mark.parametrize("left", [b"", b"HRF\xa7", bytes(5000)])
def test_a_segment_that_was_only_begun_is_begun_again(tmp_path: Path, left: bytes) -> None:
    """The process ended while it rotated: the new file is there, its head is not."""
    journal(tmp_path)
    segment(tmp_path, 2).write_bytes(left)
    with opened(tmp_path) as pool:
        assert uids(pool) == STEPS
        pool.submit_step(one("e"))
    assert frames(segment(tmp_path, 2))
    with opened(tmp_path) as pool:
        assert uids(pool) == [*STEPS, "e"]


def test_half_of_a_note_that_a_segment_follows_is_no_damage(tmp_path: Path) -> None:
    """The process ended after it had begun a segment, while it noted that in the one before."""
    in_segments(tmp_path)
    path = segment(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-7])
    assert not verify(tmp_path).damage
    with opened(tmp_path) as pool:
        assert uids(pool) == STEPS
        assert pool.events() == []


# -- a flipped bit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "lost"),
    [("the segment's head", set()), ("the first commit", {"a"}), ("a commit in the middle", {"c"})],
)
@pytest.mark.parametrize("offset", [0, 4, 5, 10, 33, 40, -1])
def test_a_flipped_bit_is_damage_that_is_named_saved_around_and_repaired(
    tmp_path: Path, where: str, lost: set[str], offset: int
) -> None:
    journal(tmp_path)
    number = {"the segment's head": 0, "the first commit": 1, "a commit in the middle": 3}[where]
    start, end = frames(segment(tmp_path))[number]
    flip(segment(tmp_path), start + offset if offset >= 0 else end + offset)
    message = refused(tmp_path)
    assert f"damaged in 000000000001.seg, bytes {start} to {end}: " in message
    assert "frame" in message
    assert f"everything around it ({len(STEPS) - len(lost)} commits)" in message
    assert set(repaired(tmp_path)) == set(STEPS) - lost


def test_a_flipped_bit_in_the_tail_is_a_torn_tail_where_no_mark_tells(tmp_path: Path) -> None:
    """Nothing else tells a bit that flipped in the last record from one that was never written."""
    journal(tmp_path)
    start, end = frames(segment(tmp_path))[-1]
    flip(segment(tmp_path), (start + end) // 2)
    (tmp_path / MARK).unlink()
    with opened(tmp_path) as pool:
        assert uids(pool) == ["a", "b", "c"]
        assert "does not match its CRC32C" in pool.events()[0].detail["detail"]
    assert list(tmp_path.glob("*.torn"))


def test_a_bit_flipped_anywhere_is_never_taken_for_data(tmp_path: Path) -> None:
    model = segment(journal(tmp_path / "model", ["a", "b", "c"])).read_bytes()
    last = frames(segment(tmp_path / "model"))[-1][0]
    for at in range(len(model)):
        folder = tmp_path / "flipped"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        segment(folder).write_bytes(model)
        flip(segment(folder), at)
        found = verify(folder)
        assert bool(found.damage) == (at < last)
        assert bool(found.torn) == (at >= last)
        assert found.commits == 2 if at >= 80 else 3


# -- a missing end -----------------------------------------------------------------------------------------------------


def killed(folder: Path, durability: Durability) -> None:
    """A journal whose process was ended with nothing closed."""
    files = Crashing()
    pool = DataPool(folder, durability=durability, files=files)
    for name in STEPS:
        pool.submit_step(one(name))
    files.crash()


@pytest.mark.parametrize("ended", ["closed", "killed", "killed, fsync"])
@pytest.mark.parametrize("cut", ["after the head", "between commits", "in a commit", "in the last one", "the last bit"])
def test_an_end_that_was_acknowledged_and_is_missing_is_damage(tmp_path: Path, ended: str, cut: str) -> None:
    if ended == "closed":
        journal(tmp_path)
    else:
        killed(tmp_path, "fsync" if "fsync" in ended else "os")
    path, places = segment(tmp_path), frames(segment(tmp_path))
    if cut == "the last bit":
        flip(path, places[-1][1] - 1)
        assert f"000000000001.seg, bytes {places[-1][0]} to {places[-1][1]}: frame damaged" in refused(tmp_path)
        assert repaired(tmp_path) == ["a", "b", "c"]
        return
    ends = {"after the head": 0, "between commits": 2, "in a commit": 2, "in the last one": 3}
    kept = ends[cut]
    size = places[kept][1] + (50 if " in " in f" {cut}" else 0)
    path.write_bytes(path.read_bytes()[:size])
    message = refused(tmp_path)
    if size == places[kept][1]:
        missing = f"commits {kept + 1} to 4 were acknowledged, and are missing at its end"
        assert f"000000000001.seg, bytes {size} to {size}: {missing}" in message
    assert repaired(tmp_path) == STEPS[:kept]


def test_what_stood_behind_a_snapshot_is_missed_too(tmp_path: Path) -> None:
    compacted(tmp_path)
    path = segment(tmp_path, 2)
    path.write_bytes(path.read_bytes()[: frames(path)[0][1]])
    assert "commits 6 to 6 were acknowledged, and are missing at its end" in refused(tmp_path)
    assert repaired(tmp_path) == STEPS


def test_after_a_start_of_the_machine_only_what_was_synced_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`os` promises nothing beyond the machine's end: what the kernel had not written then is a torn tail."""
    journal(tmp_path, ["a", "b"])  # and closed, which syncs
    files = Crashing()
    pool = DataPool(tmp_path, durability="os", files=files)
    pool.submit_step(one("c"))
    files.crash()
    monkeypatch.setattr("headrace.pool.journal.files.boot_id", lambda: b"another start...")
    path, places = segment(tmp_path), frames(segment(tmp_path))
    path.write_bytes(path.read_bytes()[: places[2][1] + 20])
    with opened(tmp_path) as pool:
        assert uids(pool) == ["a", "b"]
    path.write_bytes(path.read_bytes()[: places[1][1]])
    assert "were acknowledged, and are missing at its end" in refused(tmp_path)


def test_a_mark_that_does_not_read_back_tells_nothing(tmp_path: Path) -> None:
    journal(tmp_path)
    flip(tmp_path / MARK, 9)
    path = segment(tmp_path)
    path.write_bytes(path.read_bytes()[: frames(path)[-1][0]])
    with opened(tmp_path) as pool:
        assert uids(pool) == ["a", "b", "c"]
    assert read_watermark(tmp_path).acknowledged == 3


def test_a_mark_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    class Unmarked(Unsynced):
        def update(self, fd: int, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "no room")

    with DataPool(tmp_path, durability="os", files=Unmarked()) as pool:
        pool.submit_step(one("a"))
    with opened(tmp_path) as pool:
        assert uids(pool) == ["a"]


# -- missing files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "lost", "commits"), [(1, "a", "1 to 1"), (2, "b", "2 to 2"), (3, "c", "3 to 3")])
def test_a_missing_segment_is_named_with_the_commits_that_it_held(
    tmp_path: Path, number: int, lost: str, commits: str
) -> None:
    in_segments(tmp_path)
    segment(tmp_path, number).unlink()
    message = refused(tmp_path)
    assert f"damaged in 00000000000{number}.seg, the whole file: the segment is missing" in message
    assert f"commits {commits} are missing with it" in message
    assert repaired(tmp_path) == [name for name in STEPS if name != lost]


def test_the_last_segment_is_missed_too(tmp_path: Path) -> None:
    in_segments(tmp_path)
    segment(tmp_path, 4).unlink()
    assert "000000000004.seg, the whole file: the segment is missing" in refused(tmp_path)
    assert repaired(tmp_path) == ["a", "b", "c"]


def test_the_only_segment_is_missed_too(tmp_path: Path) -> None:
    journal(tmp_path)
    segment(tmp_path).unlink()
    assert "000000000001.seg, the whole file: the segment is missing" in refused(tmp_path)
    assert repaired(tmp_path) == []


def test_the_segment_of_a_snapshot_is_missed_too(tmp_path: Path) -> None:
    journal(tmp_path)
    with opened(tmp_path) as pool:
        pool.compact()
        pool.submit_step(one("e"))
    segment(tmp_path, 2).unlink()
    assert "000000000002.seg, the whole file: the segment is missing" in refused(tmp_path)
    assert repaired(tmp_path) == STEPS


@pytest.mark.parametrize("size", [2, 100_000])
def test_a_commit_that_is_missing_between_whole_ones_is_damage(tmp_path: Path, size: int) -> None:
    journal(tmp_path, size=size)
    start, end = frames(segment(tmp_path))[2]
    data = segment(tmp_path).read_bytes()
    segment(tmp_path).write_bytes(data[:start] + data[end:])
    assert f"000000000001.seg, bytes {start} to {start}: commits 2 to 2 are missing" in refused(tmp_path)
    assert repaired(tmp_path) == ["a", "c", "d"]


def test_a_commit_that_is_there_twice_is_damage_and_taken_once(tmp_path: Path) -> None:
    journal(tmp_path)
    start, end = frames(segment(tmp_path))[2]
    data = segment(tmp_path).read_bytes()
    segment(tmp_path).write_bytes(data[:end] + data[start:])
    assert f"000000000001.seg, bytes {end} to {end}: commit 2 stands where 3 was expected" in refused(tmp_path)
    assert repaired(tmp_path) == STEPS


def test_several_that_are_missing_are_all_named(tmp_path: Path) -> None:
    in_segments(tmp_path)
    segment(tmp_path, 1).unlink()
    segment(tmp_path, 3).unlink()
    found = verify(tmp_path)
    assert [str(damage).split(":")[0] for damage in found.damage] == [
        "000000000001.seg, the whole file",
        "000000000003.seg, the whole file",
    ]
    refused(tmp_path)
    assert repaired(tmp_path) == ["b", "d"]


def test_an_empty_segment_in_the_middle_is_damage(tmp_path: Path) -> None:
    in_segments(tmp_path)
    segment(tmp_path, 2).write_bytes(b"")
    assert "000000000002.seg, bytes 0 to 0: the file is empty" in refused(tmp_path)
    assert repaired(tmp_path) == ["a", "c", "d"]


def test_a_segment_cut_in_the_middle_of_the_journal_is_damage(tmp_path: Path) -> None:
    in_segments(tmp_path)
    path = segment(tmp_path, 2)
    start, end = frames(path)[1]
    path.write_bytes(path.read_bytes()[: end - 10])
    message = refused(tmp_path)
    assert f"000000000002.seg, bytes {start} to {end - 10}: frame cut short" in message
    assert repaired(tmp_path) == ["a", "c", "d"]


def test_damage_behind_which_a_segment_was_only_begun_is_not_taken_for_a_tail(tmp_path: Path) -> None:
    in_segments(tmp_path)
    flip(segment(tmp_path, 3), frames(segment(tmp_path, 3))[1][0] + 50)
    segment(tmp_path, 4).write_bytes(b"")
    assert "000000000003.seg, bytes" in refused(tmp_path)


def test_a_segment_from_elsewhere_is_damage(tmp_path: Path) -> None:
    in_segments(tmp_path / "here")
    in_segments(tmp_path / "there", ["x", "y"])
    shutil.copy(segment(tmp_path / "there", 2), segment(tmp_path / "here", 3))
    assert "000000000003.seg" in refused(tmp_path / "here")


# -- snapshots ---------------------------------------------------------------------------------------------------------


def compacted(folder: Path) -> Path:
    """A snapshot with a group each for a to d, of which d is leased, and a segment that adds e."""
    journal(folder)
    with opened(folder) as pool:
        pool.fetch_batch(1, order="latest", lease_s=1e8, timeout=0)
        pool.compact()
        pool.submit_step(one("e"))
    return snapshot_path(folder, 2)


def test_a_damaged_snapshot_is_named_and_what_is_lost_with_it_is_counted(tmp_path: Path) -> None:
    path = compacted(tmp_path)
    number_of_frame = 3  # the head, the channel, then the groups
    start, end = frames(path)[number_of_frame]
    flip(path, start + 60)
    assert f"damaged in 000000000002.snap, bytes {start} to {end}" in refused(tmp_path)
    assert repaired(tmp_path) == ["a", "c", "d", "e"]
    with opened(tmp_path) as pool:
        ledger = pool.stats("train")["ledger"]
        assert ledger == {
            "submitted": 6,
            "queued": 4,
            "leased": 1,
            "consumed": 0,
            "quarantined": 0,
            "dropped": {"damaged": 1},
        }
        assert {"lost": 1, "returned": 0} in damage_told(pool)


def test_any_record_of_a_snapshot_can_be_lost_and_the_rest_adds_up(tmp_path: Path) -> None:
    model = compacted(tmp_path / "model").parent
    for number in range(len(frames(snapshot_path(model, 2)))):
        folder = tmp_path / str(number)
        shutil.copytree(model, folder)
        flip(snapshot_path(folder, 2), frames(snapshot_path(folder, 2))[number][0] + 30)
        refused(folder)
        left = repaired(folder)
        assert "e" in left
        assert len(left) >= 4


def test_a_snapshot_without_its_end_is_damage(tmp_path: Path) -> None:
    path = compacted(tmp_path)
    path.write_bytes(path.read_bytes()[: frames(path)[-1][0]])
    assert "000000000002.snap" in refused(tmp_path)
    assert "the snapshot has no end" in refused(tmp_path)
    assert repaired(tmp_path) == [*STEPS, "e"]


def test_a_snapshot_that_was_never_finished_is_passed_over(tmp_path: Path) -> None:
    path = compacted(tmp_path)
    path.with_name("000000000003.tmp").write_bytes(path.read_bytes()[:200])
    with opened(tmp_path) as pool:
        assert uids(pool) == [*STEPS, "e"]
    assert not list(tmp_path.glob("*.tmp"))


# -- holes -------------------------------------------------------------------------------------------------------------


def a_busy_life(folder: Path) -> None:
    """Every kind of fact, many of which refer to earlier ones."""
    now = [1000.0]
    options = {"n_rollouts": 2, "group_timeout_s": 500.0, "on_timeout": "partial", "history_size": 2, "replies_kept": 2}
    pool = DataPool(folder, durability="os", files=Unsynced(), clock=lambda: now[0], channels={"train": options})
    for prompt in "abcde":
        pool.open(f"{prompt}/0", prompt)
        for index in range(3):
            pool.submit_steps([one(f"{prompt}/{i}", prompt, index, last=index == 2) for i in range(2)])
        pool.reward(f"{prompt}/0", 1.0)
    pool.fetch_batch(1, timeout=0, request_id="first")
    lease = pool.fetch_batch(1, lease_s=10, timeout=0)
    lease.extend(20)
    pool.submit_step(one("f/0", "f", 0, last=False, multi_modal_data={"image": b"cat" * 20}))
    pool.submit_step(one("f/0", "f", 1, last=False, multi_modal_data={"image": b"cat" * 20}))
    lease.ack()
    pool.fetch_batch(1, lease_s=10, timeout=0).nack()
    pool.fetch_batch(1, lease_s=10, timeout=0)
    pool.fetch_batch(2, unit="step", order="latest", lease_s=10, timeout=0)
    now[0] += 50
    pool.fetch_batch(1, unit="step", timeout=0)
    pool.complete("f/0", 0.5)
    pool.curate("f/0", 0, trainable=False)
    pool.set_version(3)
    pool.submit_steps([one(f"g/{i}", "g", quarantined="odd" if i else None) for i in range(2)])
    now[0] += 1000
    pool.submit_step(one("h/0", "h"))
    pool.fetch_batch(1, order="mixed", timeout=0)
    pool.submit_step(one("a/0", "a", 1, last=False))
    pool.submit_step(one("a/7", "a"))
    pool.close()


def test_any_commit_can_be_lost_and_the_rest_is_there_and_adds_up(tmp_path: Path) -> None:
    a_busy_life(tmp_path / "model")
    with JournalView(tmp_path / "model", clock=lambda: 0.0) as view:
        submitted = view.stats("train")["ledger"]["submitted"]
    places = frames(segment(tmp_path / "model"))
    assert len(places) > 40
    for number in range(1, len(places) - 1):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "model", folder)
        flip(segment(folder), places[number][0] + 38)
        assert repair(folder).damage
        with opened(folder) as pool:
            assert pool.stats("train")["ledger"]["submitted"] == submitted
        for compacts in (True, False):
            with opened(folder) as pool:
                check_rules(pool._state)
                for row in pool.list_trajectories(limit=1000)["items"]:
                    assert len(pool.trajectory(row["trajectory_uid"]).steps) == row["steps"]
                if compacts:
                    pool.compact()


def damage_told(pool: DataPool) -> list[dict[str, Any]]:
    return [event.detail for event in pool.events() if event.kind == "damage"]


def three_groups(folder: Path) -> None:
    """Commits 1 to 4: a and b, c, then a is consumed, then b; 5 and 6: d and e."""
    with opened(folder) as pool:
        pool.submit_steps([one("a"), one("b")])
        pool.submit_step(one("c"))
        pool.fetch_batch(1, timeout=0)
        pool.fetch_batch(1, timeout=0)
        pool.submit_step(one("d"))
        pool.submit_step(one("e"))


@pytest.mark.parametrize(
    ("commits", "left", "ledger", "told"),
    [
        ([2], ["d", "e"], {"queued": 2, "consumed": 2, "dropped": {"damaged": 1}}, {"lost": 1, "returned": 0}),
        ([3], ["c", "d", "e"], {"queued": 3, "consumed": 2, "dropped": {}}, None),
        ([4], ["c", "d", "e"], {"queued": 3, "consumed": 2, "dropped": {}}, None),
        ([3, 4], ["a", "c", "d", "e"], {"queued": 4, "consumed": 1, "dropped": {}}, {"lost": 0, "returned": 1}),
        ([1, 2, 3, 4], ["d", "e"], {"queued": 2, "consumed": 2, "dropped": {"damaged": 1}}, {"lost": 1, "returned": 0}),
    ],
)
def test_a_repair_counts_what_was_lost_and_repeats_what_was_decided(
    tmp_path: Path, commits: list[int], left: list[str], ledger: dict[str, Any], told: dict[str, int] | None
) -> None:
    """Each commit repeats the decision before it, so one that is lost brings no consumed step back; of several in a
    row the last is known, and how many steps the others moved."""
    three_groups(tmp_path)
    places = frames(segment(tmp_path))
    for number in commits:
        flip(segment(tmp_path), places[number][0] + 45)
    repair(tmp_path)
    with opened(tmp_path) as pool:
        check_rules(pool._state)
        assert uids(pool) == left
        assert pool.stats("train")["ledger"] == {"submitted": 5, "leased": 0, "quarantined": 0, **ledger}
        (where,) = [detail["detail"] for detail in damage_told(pool) if "detail" in detail]
        assert f"000000000001.seg, bytes {places[commits[0]][0]} to {places[commits[-1]][1]}" in where
        assert [detail for detail in damage_told(pool) if "lost" in detail] == ([told] if told else [])
        if 3 not in commits:
            assert pool.submit_step(one("a")).duplicates == (1 not in commits)


def test_every_commit_says_what_the_ledgers_were_before_it(tmp_path: Path) -> None:
    a_busy_life(tmp_path)
    state = State(ChannelConfig(), Limits())
    compared = set()

    def compare(found: frame.Frame) -> None:
        tallies = records.decode_outline(found).tallies
        assert tallies == [tuple(tally) for tally in state.tallies([name for name, *_ in tallies])]
        compared.update(name for name, *_ in tallies)
        apply(state, *records.decode_commit(found))

    assert scan(tmp_path, compare).commits > 40
    assert compared == {"train"}


def test_what_a_repair_could_not_save_does_not_pass_for_other_groups(tmp_path: Path) -> None:
    """A hand-out names its groups. The loss of an earlier group must not make it name the next one."""
    with opened(tmp_path) as pool:
        for name in "abcd":
            pool.submit_step(one(name))
        assert [step.trajectory_uid for step in pool.fetch_batch(3, timeout=0).steps] == ["a", "b", "c"]
    flip(segment(tmp_path), frames(segment(tmp_path))[2][0] + 50)
    repair(tmp_path)
    with opened(tmp_path) as pool:
        assert uids(pool) == ["d"]
        assert pool.submit_step(one("a")).duplicates == 1


# -- other releases ----------------------------------------------------------------------------------------------------


def test_a_journal_of_another_format_version_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(frame, "FORMAT_VERSION", 2)
        journal(tmp_path)
    before = content(tmp_path)
    for attempt in (opened, verify, repair):
        with pytest.raises(
            JournalError, match=r"format version 2; this release reads version 1.*release that wrote it"
        ):
            attempt(tmp_path)
    assert content(tmp_path) == before


def test_a_tail_that_a_later_release_wrote_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal(tmp_path, ["a", "b"])
    with monkeypatch.context() as later:
        later.setattr(frame, "FORMAT_VERSION", 2)
        with segment(tmp_path).open("ab") as file:
            file.write(frame_bytes(FrameKind.COMMIT, b"something new"))
    before = content(tmp_path)
    with pytest.raises(JournalError, match=r"another release.*format version 2"):
        opened(tmp_path)
    assert content(tmp_path) == before


def test_a_fact_that_this_release_does_not_know_is_refused_and_left_alone(tmp_path: Path) -> None:
    journal(tmp_path, ["a", "b"])
    commit = records.encode([[{"type": "levitated", "channel": "train"}], None, 0])
    with segment(tmp_path).open("ab") as file:
        file.writelines(frame.encode(FrameKind.COMMIT, commit, serial=3))
    before = content(tmp_path)
    with pytest.raises(
        JournalError, match=r"another release.*frame 3 holds what this release does not know.*levitated"
    ):
        opened(tmp_path)
    assert content(tmp_path) == before
