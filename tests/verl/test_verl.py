"""Real verl takes what `VerlBackend` makes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.venvs import VERL

INSIDE = Path(__file__).parent / "inside"
ROOT = INSIDE.parents[2]
#: verl looks at these when it is imported: it computes on the CPU (examples/verl_cpu.py).
ON_CPU = {"VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}


def test_everything_inside_passes_in_verls_own_environment() -> None:
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(INSIDE), "--confcutdir", str(INSIDE)]
    folders = [ROOT / "src", ROOT / "tests" / "trainer", ROOT / "examples"]
    found = subprocess.run(
        [str(VERL.python()), "-m", "pytest", *options, "--import-mode=importlib", str(INSIDE)],
        env={**os.environ, **ON_CPU, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
