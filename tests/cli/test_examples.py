"""The examples run as they stand, and are short enough to read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.command import Served

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *args], capture_output=True, text=True, timeout=240, cwd=folder
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_quickstart_runs_twice_on_the_same_journal(tmp_path: Path) -> None:
    assert run("pool_quickstart.py", tmp_path).startswith("[4 5] {'submitted': 1, ")
    assert run("pool_quickstart.py", tmp_path).startswith("[4 5] {'submitted': 2, ")
    assert list((tmp_path / "runs" / "pool").glob("*.seg"))


def test_the_quickstart_runs_over_http(tmp_path: Path) -> None:
    with Served() as server:
        assert run("pool_quickstart.py", tmp_path, server.address).startswith("[4 5] {'submitted': 1, ")
    assert list(tmp_path.iterdir()) == []


def test_the_example_of_leases_runs(tmp_path: Path) -> None:
    lines = run("pool_leases.py", tmp_path).splitlines()
    assert lines[0] == "leased: game0 rewards [0.0, 1.0]"
    assert lines[1] == "again: game0 delivery 2"
    assert lines[2].startswith("a stale lease is refused: ")
    assert lines[3].startswith("ledger: {'submitted': 4, 'queued': 2, 'leased': 0, 'consumed': 2")


def test_the_awaitable_example_runs(tmp_path: Path) -> None:
    lines = run("pool_async.py", tmp_path).splitlines()
    assert lines[2] == "agent2 tokens [1, 2, 3, 10, 4, 11, 4, 12] trained 3"
    assert lines[3].startswith("{'submitted': 6, 'queued': 0, 'leased': 0, 'consumed': 6")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("pool_*.py")), ids=lambda path: path.name)
def test_an_example_fits_on_a_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 40
