"""The simulation: a seed is a run, byte for byte; the pool as it is breaks no promise; and each bug that is put into it
is found, by the storm's checker, within a few seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.storm.seeded_bugs import BUGS, drop_tombstones, forget_hand_outs_over_restarts, leave_out_the_fsync

from headrace.storm.checker import check
from headrace.storm.log import read_logs
from headrace.storm.simulation import play, play_seeds

#: Seeds within which a bug must be found, and calls on the pool in each.
BUDGET, OPERATIONS = 8, 1500
#: Bugs that only a later seed shows.
LATE = {leave_out_the_fsync, drop_tombstones, forget_hand_outs_over_restarts}


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=[pytest.mark.long] if bug in LATE else []) for bug in BUGS],
    ids=lambda bug: bug.__name__,
)
def test_a_seeded_bug_is_found(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    for seed in range(BUDGET):
        found = {kind for kind, count in play(seed, operations=OPERATIONS).report.counts.items() if count}
        if found:
            assert found & BUGS[bug], f"seed {seed} shows {found}"
            return
    pytest.fail(f"{BUDGET} seeds found nothing")


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, pytest.param(50, marks=pytest.mark.long)])
def test_the_pool_as_it_is_breaks_no_promise(seeds: int) -> None:
    told: list[str] = []
    summary = play_seeds(range(seeds), operations=OPERATIONS, tell=told.append)
    assert not summary.failed, told
    assert summary.figures["operations"] >= seeds * OPERATIONS
    for fault in ("kill", "power", "restart", "network", "full_disk", "slow_disk", "failed_sync", "clock"):
        assert summary.figures[fault] > 0, fault
    assert summary.figures["redelivered"] > 0, "no lease ran out in all that time"


def test_the_same_seed_is_the_same_log_in_any_process(tmp_path: Path) -> None:
    program = "from headrace.storm.simulation import play; print(play(7, operations=400).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    first, second = (play(7, operations=400, folder=tmp_path / name) for name in ("one", "two"))
    logs = [(tmp_path / name / "simulation.events.jsonl").read_bytes() for name in ("one", "two")]
    assert logs[0] == logs[1]
    assert first.digest == second.digest == elsewhere.stdout.strip()
    assert play(8, operations=400).digest != first.digest


def test_the_storms_checker_reads_a_simulations_log_from_its_folder(tmp_path: Path) -> None:
    played = play(1, operations=400, folder=tmp_path)
    report = check(read_logs(tmp_path))
    assert report.clean
    assert report.figures == played.report.figures
    assert report.figures["steps"] > 20
