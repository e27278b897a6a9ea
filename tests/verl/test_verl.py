"""Real verl takes what `VerlBackend` makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.venvs import VERL

INSIDE = Path(__file__).parent / "inside"
ROOT = INSIDE.parents[2]


def test_everything_inside_passes_in_verls_own_environment() -> None:
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(INSIDE), "--confcutdir", str(INSIDE)]
    found = subprocess.run(
        [str(VERL.python()), "-m", "pytest", *options, "--import-mode=importlib", str(INSIDE)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "trainer")])},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
