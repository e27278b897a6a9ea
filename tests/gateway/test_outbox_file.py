"""The outbox's file: half a record, whoever left it, hides nothing that is written later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import Step
from headrace.data.block import Block
from headrace.data.packing import pack
from headrace.gateway.outbox import Spool


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox"


@pytest.fixture
def spool(path: Path) -> Iterator[Spool]:
    found = Spool(path)
    yield found
    found.close()


def call(uid: str) -> Block:
    """One call's step."""
    return pack([Step(prompt_ids=[1], response_ids=[2], trajectory_uid=uid, prompt_uid="p", step_index=0)])


def uids(path: Path) -> list[str]:
    reader = Spool(path)
    try:
        return [block.heads[0].trajectory_uid for _, block in reader.read()]
    finally:
        reader.close()


async def test_what_is_written_behind_a_torn_tail_is_read_again(path: Path, spool: Spool) -> None:
    await spool.append("train", call("first"))
    with path.open("ab") as file:
        file.write((1000).to_bytes(8, "little") + b"half of it")
    next_life = Spool(path)
    assert [block.heads[0].trajectory_uid for _, block in next_life.read()] == ["first"]
    await next_life.append("train", call("second"))
    next_life.close()
    assert uids(path) == ["first", "second"]


async def test_a_write_that_fails_halfway_leaves_nothing_behind(
    path: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
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
    assert uids(path) == ["first", "second"]
