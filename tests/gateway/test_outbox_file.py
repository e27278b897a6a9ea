"""The outbox's file: damage costs what it touches, half a record hides nothing that is written later."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import Step
from headrace.data.block import Block
from headrace.data.packing import pack
from headrace.gateway import outbox_file
from headrace.gateway.outbox_file import FRAME_MARK, OutboxFile
from headrace.pool.errors import JournalLocked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox"


@pytest.fixture
def spool(path: Path) -> Iterator[OutboxFile]:
    found = OutboxFile(path)
    yield found
    found.close()


def call(uid: str) -> Block:
    """One call's step."""
    return pack([Step(prompt_ids=[1], response_ids=[2], trajectory_uid=uid, prompt_uid="p", step_index=0)])


def uids(path: Path) -> list[str]:
    reader = OutboxFile(path)
    try:
        return [block.heads[0].trajectory_uid for _, _, block in reader.read()]
    finally:
        reader.close()


async def written(path: Path, *names: str) -> bytes:
    """The file after calls of these trajectories were written down."""
    spool = OutboxFile(path)
    for name in names:
        await spool.append("train", call(name))
    spool.close()
    return path.read_bytes()


async def test_what_is_written_behind_a_torn_tail_is_read_again(path: Path) -> None:
    whole = await written(path, "first", "torn")
    path.write_bytes(whole[:-7])
    assert uids(path) == ["first"]
    await written(path, "second")
    assert uids(path) == ["first", "second"]
    assert not OutboxFile(path).aside.exists(), "what was never acknowledged is no damage"


async def test_a_flipped_bit_costs_the_call_that_it_is_in_and_is_kept_aside(path: Path) -> None:
    names = [f"t{n}" for n in range(8)]
    whole = bytearray(await written(path, *names))
    at = whole.index(b"t2")
    whole[at] ^= 1
    path.write_bytes(whole)
    spool = OutboxFile(path)
    assert [block.heads[0].trajectory_uid for _, _, block in spool.read()] == [name for name in names if name != "t2"]
    assert spool.damaged == spool.aside.stat().st_size > 0
    spool.close()


@pytest.mark.parametrize("lost", [0, 3, 7])
async def test_a_mark_or_a_length_that_is_damaged_hides_no_other_call(path: Path, lost: int) -> None:
    names = [f"t{n}" for n in range(8)]
    whole = bytearray(await written(path, *names))
    starts = [found.start() for found in re.finditer(re.escape(FRAME_MARK), whole)]
    for at in (starts[lost], starts[lost] + len(FRAME_MARK) + 3):  # its mark, or its length
        broken = bytearray(whole)
        broken[at] ^= 0x40
        path.write_bytes(broken)
        assert uids(path) == [name for n, name in enumerate(names) if n != lost]


async def test_two_processes_never_share_a_file(path: Path, spool: OutboxFile) -> None:
    await spool.append("train", call("first"))
    with pytest.raises(JournalLocked, match="in use by another gateway"):
        OutboxFile(path)
    spool.close()
    assert uids(path) == ["first"]
    spool.__init__(path)  # type: ignore[misc]  # for the fixture to close


async def test_a_write_that_fails_halfway_leaves_nothing_behind(
    path: Path, spool: OutboxFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    await spool.append("train", call("first"))
    write = os.write

    def full(fd: int, data: memoryview) -> int:
        write(fd, data[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        await spool.append("train", call("lost"))
    monkeypatch.undo()
    await spool.append("train", call("second"))
    spool.close()
    assert uids(path) == ["first", "second"]
    spool.__init__(path)  # type: ignore[misc]  # for the fixture to close


async def test_it_grows_no_larger_than_what_waits_makes_it(
    path: Path, spool: OutboxFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_file, "SLACK_BYTES", 4096)
    stuck = [await spool.append("full", call(f"stuck{n}")) for n in range(2)]
    record = path.stat().st_size // 2
    for n in range(200):
        await spool.let_go(await spool.append("train", call(f"sent{n}")))
        assert path.stat().st_size <= 4096 + 6 * record
    await spool.append("train", call("last"))
    spool.close()
    assert [uid for uid in uids(path) if not uid.startswith("sent")] == ["stuck0", "stuck1", "last"]
    spool.__init__(path)  # type: ignore[misc]
    for number, _, _ in list(spool.read()):
        await spool.let_go(number)
    assert stuck == [0, 1]
    assert path.stat().st_size == 0


async def test_what_was_written_and_is_not_queued_yet_is_not_cut_off(path: Path, spool: OutboxFile) -> None:
    first = await spool.append("train", call("first"))
    await spool.append("train", call("second"))
    await spool.let_go(first)
    spool.close()
    assert uids(path) == ["first", "second"]
    spool.__init__(path)  # type: ignore[misc]  # for the fixture to close


async def test_where_it_cannot_be_written_anew_it_stays_as_it_is(
    path: Path, spool: OutboxFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outbox_file, "SLACK_BYTES", 0)
    for n in range(4):
        await spool.append("train", call(f"t{n}"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        for number in range(3):
            await spool.let_go(number)
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    await spool.append("train", call("next"))
    spool.close()
    assert uids(path) == ["t0", "t1", "t2", "t3", "next"]
    spool.__init__(path)  # type: ignore[misc]  # for the fixture to close
