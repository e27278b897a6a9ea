"""`torchrun -m headrace train`: a rank that is killed, a start that resumes by itself, one error for a mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.pool.servers import serving
from tests.trainer.kit import pool_of

pytestmark = [pytest.mark.slow, pytest.mark.system]

GROUPS = [[0.0, 1.0], [1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [0.0, 1.0], [1.0, 0.5], [0.0, 1.0], [1.0, 0.0]]

#: Has rank 1 die once, in the third step, as a module of its own would not do.
DYING = """
import os, pathlib, signal
from headrace.cli import main
from headrace.trainer.learner import Learner

learn = Learner.learn

def dying(self, sequences, step, version):
    mark = pathlib.Path("died")
    if self.ranks.rank == 1 and step == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return learn(self, sequences, step, version)

Learner.learn = dying
main()
"""


def torchrun(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    """Two ranks of this machine, with one restart."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *given], cwd=folder, env=env, capture_output=True, text=True, timeout=1000)


def test_a_killed_rank_is_begun_again_and_the_run_resumes_by_itself(model: Path, tmp_path: Path) -> None:
    pool = pool_of(GROUPS, vocabulary=300)
    (tmp_path / "dying.py").write_text(DYING)
    with serving(pool) as address:
        fetching = {"address": address, "batch_size": 2}
        given = {"model": str(model), "run": "run", "steps": 4, "pool": fetching, "checkpoint": {"every": 1}}
        (tmp_path / "train.yaml").write_text(yaml.safe_dump(given))
        done = torchrun(tmp_path, "dying.py", "train", "train.yaml")
        stats = pool.stats()
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "died").exists()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert stats["balanced"]
    assert stats["ledger"]["consumed"] == sum(map(len, GROUPS))
    assert done.stdout.count("trainer ready") == 2  # rank 0 alone speaks, once a start
