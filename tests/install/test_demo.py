"""`make demo` on a machine that has nothing: its extra is enough."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.install.kit import ROOT, Clean

#: What `make setup` adds, and the demo must do without.
OTHERS = ("ray", "pyarrow", "pytest", "math_verify", "wandb", "anthropic")


@pytest.mark.usefixtures("built")
def test_the_demo_needs_no_more_than_its_extra(tmp_path: Path) -> None:
    clean = Clean(tmp_path / "venv")
    set_up = [sys.executable, str(ROOT / "tools" / "setup.py"), "demo", "--venv", str(clean.folder)]
    done = subprocess.run(set_up, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(f". {clean.folder}/bin/activate")
    for name in OTHERS:
        assert clean.python("-c", f"import {name}").returncode == 1, name
    played = clean.headrace("demo", "--task", "number3", "--steps", "2", cwd=tmp_path)
    # Two steps teach nothing; that they were made shows that engine, gateway, agents and trainer had all they need.
    assert '"steps"' in played.stdout, played.stdout + played.stderr
    assert json.loads(played.stdout.splitlines()[-1])["steps"] == 2
