"""What a later release wrote is refused: it is named, with what to do, and left as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.upgrades import make
from tests.upgrades.make import RELEASES

from headrace import DataPool
from headrace.data import frame
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.data.packing import pack
from headrace.envs.sender import GroupSpool
from headrace.flows.rollout_state import RolloutStateFile
from headrace.gateway.outbox_file import FRAME_MARK, OutboxFile
from headrace.pool.errors import JournalError
from headrace.version import __version__

NEWEST = max(RELEASES.iterdir(), key=lambda path: [int(part) for part in path.name.split(".")])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return Path(shutil.copytree(NEWEST, tmp_path / "kept"))


def content(folder: Path) -> dict[str, bytes]:
    kept = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept if path.name not in make.LEFT_OUT}


def raised_to(path: Path, version: int) -> None:
    """Says in a file that it is of a later format."""
    path.write_text(json.dumps({**json.loads(path.read_text() or "{}"), "format_version": version, "new": {"a": 1}}))


def open_outbox(files: Path) -> None:
    file = OutboxFile(files / "outbox")
    try:
        list(file.read())
    finally:
        file.close()


def resume(files: Path) -> None:
    from headrace.trainer.checkpoint import Checkpoints

    checkpoints = Checkpoints(files / "run", files, 1)
    assert checkpoints.latest is not None
    checkpoints.load(checkpoints.latest)


OPENS: dict[str, Callable[[Path], Any]] = {
    "spool/lock": lambda files: GroupSpool(files / "spool"),
    "state.json": lambda files: RolloutStateFile(files / "state.json").load(12, 4),
    "run/checkpoints/*/progress.json": resume,
}


@pytest.mark.parametrize("name", OPENS)
def test_a_file_of_a_later_format_is_refused_and_left_alone(files: Path, name: str) -> None:
    (path,) = files.glob(name)
    raised_to(path, 2)
    before = content(files)
    with pytest.raises(
        InvalidInput, match=r"format version 2, and this release reads up to version 1.*use the release"
    ):
        OPENS[name](files)
    assert content(files) == before
    raised_to(path, 1)
    OPENS[name](files)


def test_an_outbox_of_a_later_format_is_refused_and_nothing_is_cut_off(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(frame, "FORMAT_VERSION", 2)
        make.outbox(files / "outbox")  # behind what this release wrote
    before = content(files)
    with pytest.raises(
        JournalError, match=r"outbox .* is of another release: at byte \d+.*format version 2.*start that"
    ):
        open_outbox(files)
    assert content(files) == before


async def test_bytes_that_begin_no_call_are_kept_aside_and_not_cut_off(tmp_path: Path) -> None:
    """What is torn begins as a call does; anything else is damage, or another program's."""
    path = tmp_path / "outbox"
    path.write_bytes(b"something else altogether")
    open_outbox(tmp_path)
    assert (path.read_bytes(), (tmp_path / "outbox.damaged").read_bytes()) == (b"", b"something else altogether")
    for torn in (FRAME_MARK[:3], FRAME_MARK + b"\x05"):
        path.write_bytes(torn)
        (tmp_path / "outbox.damaged").unlink(missing_ok=True)
        open_outbox(tmp_path)
        assert (path.read_bytes(), (tmp_path / "outbox.damaged").exists()) == (b"", False)


def test_a_journal_of_a_later_format_is_refused_and_left_alone(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(frame, "FORMAT_VERSION", 2)
        with DataPool(files / "newer", durability="os") as pool:
            pool.submit_step(make.step("a"))
    before = content(files)
    with pytest.raises(JournalError, match=r"of another release.*format version 2.*use the release that wrote it"):
        DataPool(files / "newer")
    assert content(files) == before


def test_a_call_of_a_later_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gateway that was upgraded before its pool: it keeps what it has, and sends it to the pool of its release."""
    from headrace.pool.wire import decode_call, encode_call

    with monkeypatch.context() as later:
        later.setattr(frame, "FORMAT_VERSION", 2)
        call = encode_call("submit", {"channel": "train"}, pack([make.step("a")]))
    with pytest.raises(HeadraceError, match="format version 2; this release reads version 1"):
        decode_call(call)


def test_this_release_has_files_of_its_own() -> None:
    """They are made with the release: `python -m tests.upgrades.make`."""
    assert NEWEST.name == __version__
