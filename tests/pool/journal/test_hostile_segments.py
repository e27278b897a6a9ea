"""Segments whose checksums are right and whose content is not, as another release or another program would leave them:
the journal opens with what it holds, or says why not; nothing else is raised, and a refusal changes no file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzzing import damaged, examples, mutated
from tests.pool.journal.kit import frames, one, segment

from headrace import DataPool
from headrace.data import frame
from headrace.pool.errors import JournalError
from headrace.pool.journal.repair import verify


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal with commits of several kinds; none of the tests changes it."""
    folder = tmp_path_factory.mktemp("made") / "journal"
    with DataPool(folder, durability="os") as pool:
        pool.configure("pairs", n_rollouts=2)
        pool.submit_steps([one("a", index=0, last=False), one("a", index=1), one("b", multi_modal_data={"i": b"png"})])
        pool.reward("a", 0.5)
        batch = pool.fetch_batch(1, lease_s=600)
        assert batch is not None
        batch.ack()
        pool.fail("b", "because")
        pool.open("c", "c", metadata={"truth": 1})
    return folder


def content(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in ("lock", "reserve"))
    return {path.name: path.read_bytes() for path in files}


def opens_or_refuses(folder: Path) -> None:
    """A refusal is a `JournalError`, and leaves the files as they were; a saved copy may stand beside them."""
    before = content(folder)
    try:
        verify(folder)
    except JournalError:
        pass
    assert content(folder) == before
    try:
        with DataPool(folder, durability="os") as pool:
            pool.stats()
            for row in pool.list_trajectories()["items"]:
                assert pool.trajectory(row["trajectory_uid"]).steps is not None
    except JournalError:
        after = content(folder)
        assert {name: after[name] for name in before} == before


def copied(made: Path, into: Path) -> Path:
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    for name in content(made):
        shutil.copy(made / name, into / name)
    return into


@examples(40)
@given(data=st.data())
def test_a_commit_that_says_anything_else_opens_or_is_refused(
    made: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = copied(made, tmp_path_factory.getbasetemp() / "hostile-commit")
    path = segment(folder)
    whole = path.read_bytes()
    start, end = data.draw(st.sampled_from(frames(path)))
    found = frame.decode(whole, start)
    header: Any = data.draw(mutated(msgspec.msgpack.decode(found.header)))
    changed = frame.encode(found.kind, msgspec.msgpack.encode(header), [bytes(found.body)], serial=found.serial)
    path.write_bytes(whole[:start] + b"".join(changed) + whole[end:])
    opens_or_refuses(folder)


def test_a_commit_about_a_trajectory_without_a_uid_is_refused(made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "journal")
    path = segment(folder)
    whole = path.read_bytes()
    start, _ = frames(path)[-1]
    found = frame.decode(whole, start)
    header = msgspec.msgpack.encode([[{"type": "open", "channel": "train", "at": 1.0, "prompt": "p", "group": 99}]])
    path.write_bytes(whole[:start] + b"".join(frame.encode(found.kind, header, serial=found.serial)))
    before = content(folder)
    with pytest.raises(JournalError, match="trajectory_uid must be a string"):
        DataPool(folder)
    assert content(folder) == before


@examples(25)
@given(data=st.data())
def test_a_damaged_segment_opens_or_is_refused(
    made: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = copied(made, tmp_path_factory.getbasetemp() / "hostile-segment")
    path = segment(folder)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    opens_or_refuses(folder)


@pytest.mark.parametrize("header", [b"\xa2\xff\xfe", b"\x91" * 3000 + b"\xc0", b"\xc1", b"", b"\xd4\x05\x01"], ids=repr)
def test_a_commit_that_is_no_msgpack_is_of_another_release(made: Path, tmp_path: Path, header: bytes) -> None:
    folder = copied(made, tmp_path / "journal")
    path = segment(folder)
    start, _ = frames(path)[-1]
    found = frame.decode(path.read_bytes(), start)
    changed = frame.encode(frame.FrameKind.COMMIT, header, serial=found.serial)
    path.write_bytes(path.read_bytes()[:start] + b"".join(changed))
    before = content(folder)
    with pytest.raises(JournalError, match="of another release"):
        DataPool(folder)
    assert content(folder) == before
