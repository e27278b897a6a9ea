"""The file that keeps a rollouter's place: whole at every moment, one holder at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.flows.rollout_state import RolloutStateFile

#: Saves states that grow and shrink until it is killed; each says its number in two places.
PROGRAM = """
import itertools, pathlib, sys
from headrace.flows.rollout_state import RolloutStateFile
with RolloutStateFile(pathlib.Path(sys.argv[1])) as file:
    state = file.load(3)
    for number in itertools.count(state.position):
        state.position = number
        state.validated = [number] * (number % 7 * 400 + 1)
        file.save(state)
        if number == state.position % 5: print("saving", flush=True)
"""


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    with RolloutStateFile(tmp_path / "deep" / "state.json") as file:
        state = file.load(3, 1)
        assert (state.rows, state.val_rows, state.base_version) == (3, 1, None)
        state.accepted = 7
        file.save(state)
        assert file.load(3, 1) == state


def test_two_runs_have_different_names() -> None:
    file = RolloutStateFile(None)
    assert file.load(3).run != file.load(3).run


def test_a_kill_at_any_moment_leaves_a_whole_state(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    last = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        if last == 0:
            assert process.stdout.readline() == b"saving\n"
        while not path.exists():
            os.sched_yield()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with RolloutStateFile(path) as file:
            state = file.load(3)
        assert set(state.validated) == {state.position}
        assert state.position >= last
        last = state.position


def test_one_rollouter_has_it_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    with RolloutStateFile(path), pytest.raises(HeadraceError, match=r"another rollouter has .*state\.json"):
        RolloutStateFile(path).__enter__()
    with RolloutStateFile(path):
        pass  # given back


def test_a_file_of_something_else_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text('{"rows": "many"}')
    with pytest.raises(InvalidInput, match="is no state of a rollouter"):
        RolloutStateFile(path).load(3)
    assert path.read_text() == '{"rows": "many"}'
