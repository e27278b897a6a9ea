"""A run's folder: one run at a time, also while a killed one still ends, and resumed only as what it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.run import folder
from headrace.run.folder import RunState, begin, latest, locked, resume

CONFIG: dict[str, Any] = {"model": "m", "data": {"train": "a.jsonl"}, "agent": {"run": "a.py:f"}, "train": {"steps": 5}}

#: Takes the lock, starts a child that keeps it and ignores that its parent dies, says so, and waits.
HOLDER = """
import subprocess, sys, time
from pathlib import Path
from headrace.run.folder import locked
with locked(Path(sys.argv[1])) as held:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[held])
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield process, child
    for pid in (process.pid, child):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.communicate()


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path, holder: Any) -> None:
    process, _ = holder
    said = rf"in use by another `headrace run` .process {process.pid}.*--run-dir"
    with pytest.raises(InvalidInput, match=said), locked(tmp_path):
        pass


def test_a_resumed_run_waits_for_the_processes_of_the_one_that_was_killed(
    tmp_path: Path, holder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, child = holder
    process.kill()
    process.wait()
    monkeypatch.setattr(folder, "ORPHANS_S", 0.3)
    with pytest.raises(HeadraceError, match="have not ended yet"), locked(tmp_path):
        pass
    monkeypatch.setattr(folder, "ORPHANS_S", 300.0)
    os.kill(child, signal.SIGKILL)
    with locked(tmp_path):
        pass


def test_a_run_begins_in_an_empty_folder_alone(tmp_path: Path) -> None:
    begin(tmp_path / "run", CONFIG)
    with pytest.raises(InvalidInput, match="holds a run: go on with --resume"):
        begin(tmp_path / "run", CONFIG)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("mine")
    with pytest.raises(InvalidInput, match=r"not empty\. Name another folder"):
        begin(tmp_path / "other", CONFIG)


def test_a_run_is_resumed_as_what_it_was(tmp_path: Path) -> None:
    begin(tmp_path, CONFIG)
    more = {**CONFIG, "train": {"steps": 9, "optimizer": {"lr": 1.0}}}
    assert resume(tmp_path, more).config == more
    with pytest.raises(InvalidInput, match=r"model was m when .* began, and is other now"):
        resume(tmp_path, {**CONFIG, "model": "other"})
    with pytest.raises(InvalidInput, match="holds no run"):
        resume(tmp_path / "nowhere", CONFIG)


def test_a_run_is_resumed_with_batches_of_the_size_that_its_rollouts_were_counted_in(tmp_path: Path) -> None:
    config = {**CONFIG, "train": {"steps": 5, "batch_size": 8}}
    smaller = {**CONFIG, "train": {"steps": 5, "batch_size": 4}}
    begin(tmp_path / "rows", config)
    with pytest.raises(InvalidInput, match=r"train\.batch_size was 8 when .* began, and is 4 now; put it back"):
        resume(tmp_path / "rows", smaller)
    environment = {"data": None, "agent": {"env": "env.py"}}  # it is told the size when the trainer registers
    begin(tmp_path / "environment", {**config, **environment})
    resumed = {**smaller, **environment}
    assert resume(tmp_path / "environment", resumed).config == resumed


def test_a_state_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / folder.STATE_FILE).write_bytes(b'{"config": ')
    with pytest.raises(InvalidInput, match=f"{tmp_path / folder.STATE_FILE} cannot be read: "):
        resume(tmp_path, CONFIG)


def test_a_run_that_made_its_steps_is_resumed_with_more_only(tmp_path: Path) -> None:
    begin(tmp_path, CONFIG)
    RunState(config=CONFIG, ended=5).write(tmp_path)
    with pytest.raises(InvalidInput, match=r"has made its 5 steps; more: --set train.steps=10"):
        resume(tmp_path, CONFIG)
    assert resume(tmp_path, {**CONFIG, "train": {"steps": 10}}).ended == 0


def test_the_latest_run_of_a_file_is_found(tmp_path: Path) -> None:
    for name in ("run-1", "run-2", "other-3"):
        begin(tmp_path / name, CONFIG)
    assert latest(tmp_path, "run") == tmp_path / "run-2"
    with pytest.raises(InvalidInput, match=r"there is no run of mine.*--run-dir"):
        latest(tmp_path, "mine")
