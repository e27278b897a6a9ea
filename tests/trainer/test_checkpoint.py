"""Checkpoints are complete or absent, whenever whoever writes them is killed."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.trainer.checkpoint import Checkpoints, Progress
from headrace.trainer.ranks import ALONE
from headrace.trainer.sharded_state import write_state


class Killed(BaseException):
    """What nothing catches, as nothing catches SIGKILL."""


def save(checkpoints: Checkpoints, step: int, value: float) -> None:
    write = partial(write_state, state={}, ranks=ALONE)
    checkpoints.save(Progress(step=step), {"weight": torch.tensor([value])}, write)


def value_of(checkpoints: Checkpoints, place: Path) -> float:
    return float(checkpoints.load(place)[1]["weight"])


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Dies at the change of folders of this number: before a rename, and in the middle of a deletion."""
    done, rename, rmtree = 0, Path.rename, shutil.rmtree

    def dies() -> bool:
        nonlocal done
        done += 1
        return done > number

    def renaming(self: Path, target: Any) -> Any:
        if dies():
            raise Killed
        return rename(self, target)

    def deleting(path: Path, **options: Any) -> None:
        if path.exists() and dies():
            min(path.iterdir()).unlink()
            raise Killed
        rmtree(path, **options)

    monkeypatch.setattr(Path, "rename", renaming)
    monkeypatch.setattr(shutil, "rmtree", deleting)


@pytest.mark.parametrize("number", range(5))
def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_one_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    checkpoints = Checkpoints(tmp_path, tmp_path, keep=1)
    save(checkpoints, 1, 10.0)
    save(checkpoints, 2, 20.0)
    with monkeypatch.context() as patch:
        kill_at(patch, number)
        with pytest.raises(Killed) if number < 4 else nullcontext():  # aside, in its place, out of the way, deleted
            save(checkpoints, 2, 21.0)
    again = Checkpoints(tmp_path, tmp_path, keep=1)
    again.recover()
    assert [path.name for path in again.folder.iterdir()] == ["00000002"]
    assert again.latest is not None
    assert value_of(again, again.latest) == (20.0 if number < 2 else 21.0)
    save(again, 3, 30.0)
    assert [path.name for path in again.folder.iterdir()] == ["00000003"]


@pytest.mark.parametrize("number", range(3))
def test_a_kill_while_the_oldest_is_deleted_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    checkpoints = Checkpoints(tmp_path, tmp_path, keep=1)
    save(checkpoints, 1, 10.0)
    with monkeypatch.context() as patch:
        kill_at(patch, number)
        with pytest.raises(Killed):
            save(checkpoints, 2, 20.0)
    checkpoints.recover()
    found = {path.name: value_of(checkpoints, path) for path in checkpoints.folder.iterdir()}
    whole = {"00000001": 10.0, "00000002": 20.0}
    assert found == {name: whole[name] for name in found}
    assert checkpoints.latest is not None
    assert checkpoints.latest.name == ("00000001" if number == 0 else "00000002")


def test_what_recovers_leaves_whole_checkpoints_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, tmp_path, keep=2)
    checkpoints.recover()
    save(checkpoints, 1, 10.0)
    save(checkpoints, 2, 20.0)
    checkpoints.recover()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["00000001", "00000002"]
