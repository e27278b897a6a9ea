"""What does not fit into memory waits on the disk, and comes back bit for bit; nothing of it is left behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.pool.journal.kit import check_rules, dump, same
from tests.pool.scored.kit import scored_stats, started

from headrace import DataPool
from headrace.data.frame import Buffer
from headrace.data.scored import Piece
from headrace.pool.config import Limits
from headrace.pool.errors import DiskFull
from headrace.pool.journal.files import Files
from headrace.pool.scored import piece_store
from headrace.pool.scored.types import Posting

LIMITS = Limits(desk_memory_mb=0.01)
SIZE = 1000


def group(name: int) -> Posting:
    """Bytes that say which group they are; the pool looks into none of them."""
    return Posting(Piece(bytes([name]) * SIZE, SIZE, name), 4)


def scratch_files(folder: Path) -> int:
    """Files without a name that this process has open in a folder."""
    links = [_link(fd) for fd in os.listdir("/proc/self/fd")]
    return sum(link.startswith(str(folder)) and link.endswith("(deleted)") for link in links)


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""  # closed since it was listed


@pytest.mark.parametrize("journal", [False, True])
def test_memory_is_bounded_and_the_newest_wait_on_the_disk(tmp_path: Path, journal: bool) -> None:
    options: dict[str, Any] = {"journal": tmp_path, "durability": "os"} if journal else {}
    with DataPool(limits=LIMITS, **options) as pool:
        started(pool)
        for name in range(50):
            pool.desk_post([group(name)])
            assert scored_stats(pool)["memory_bytes"] <= 10_000
        assert scored_stats(pool)["spilled_bytes"] == 40_000
        for name in range(50):
            batch = pool.desk_batch()
            assert batch is not None
            assert batch.pieces == [group(name).piece]
            pool.desk_ack(batch.lease)
        assert (scored_stats(pool)["memory_bytes"], scored_stats(pool)["spilled_bytes"]) == (0, 0)


def test_a_file_goes_with_the_last_group_in_it_and_all_go_with_the_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(piece_store, "SCRATCH_FILE_BYTES", 5 * SIZE)
    pool = DataPool(tmp_path, durability="os", limits=LIMITS)
    started(pool)
    pool.desk_post([group(name) for name in range(30)])
    assert scratch_files(tmp_path) == 4
    for _ in range(20):
        batch = pool.desk_batch()
        assert batch is not None
        pool.desk_ack(batch.lease)
    assert scratch_files(tmp_path) == 2
    pool.close()
    assert scratch_files(tmp_path) == 0
    assert {path.suffix for path in tmp_path.iterdir()} <= {".seg", ""}


@pytest.mark.parametrize("compacted", [False, True])
def test_what_was_spilled_is_recovered_from_the_journal(tmp_path: Path, compacted: bool) -> None:
    with DataPool(tmp_path, durability="os", limits=LIMITS) as pool:
        started(pool)
        pool.desk_post([group(name) for name in range(30)])
        before = dump(pool._state)
        if compacted:
            pool.compact()
    with DataPool(tmp_path, durability="os", limits=LIMITS) as pool:
        assert same(before, dump(pool._state))
        check_rules(pool._state)
        assert scored_stats(pool)["spilled_bytes"] == 20_000


class Full(Files):
    """A disk on which only the journal has room."""

    full = False

    def write(self, fd: int, buffers: Sequence[Buffer]) -> None:
        if self.full and not os.readlink(f"/proc/self/fd/{fd}").endswith(".seg"):
            os.write(fd, bytes(buffers[0])[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, buffers)


def test_a_queue_that_did_not_fit_into_memory_opens_again_on_a_full_disk(tmp_path: Path) -> None:
    files = Full()
    with DataPool(tmp_path, durability="os", limits=LIMITS, files=files) as pool:
        started(pool)
        pool.desk_post([group(name) for name in range(30)])
        before = dump(pool._state)
    files.full = True
    with DataPool(tmp_path, durability="os", limits=LIMITS, files=files) as pool:
        assert same(before, dump(pool._state))
        assert scored_stats(pool)["queued"] == 30
        assert pool.desk_batch() is not None


@pytest.mark.parametrize("journal", [False, True])
def test_a_full_disk_refuses_what_does_not_fit_and_keeps_the_rest(tmp_path: Path, journal: bool) -> None:
    files = Full()
    options: dict[str, Any] = {"journal": tmp_path, "durability": "os", "files": files} if journal else {}
    with DataPool(limits=LIMITS, **options) as pool:
        pool._state.scored.pieces.scratch = piece_store.ScratchFiles(tmp_path, files.write)
        started(pool)
        pool.desk_post([group(name) for name in range(12)])
        files.full = True
        with pytest.raises(DiskFull, match="nothing was taken"):
            pool.desk_post([group(12), group(13)])
        assert scored_stats(pool)["posted"] == 12
        files.full = False
        pool.desk_post([group(14)])
        found = []
        while (batch := pool.desk_batch()) is not None:
            found += [piece.crc for piece in batch.pieces]
            assert batch.pieces == [group(found[-1]).piece]
        assert found == [*range(12), 14]
