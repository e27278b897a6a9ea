"""Every Python that is declared: the whole set resolves to wheels at the pins, and what needs no torch runs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.install.kit import CONSTRAINTS, ROOT, Clean, interpreter, uv_settings

VERSIONS = ("3.11", "3.12", "3.13")
#: Of the tests, those that show most for their seconds and need none of torch, Ray and a tokenizer.
SUITE = ("tests/data", "tests/pool/test_policies.py", "tests/pool/test_http.py", "tests/pool/test_time.py")
#: What these need beside the core.
TOOLS = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "httpx", "psutil")
#: Imports every module of the package, but for those that lack a library of an extra, which it prints.
IMPORT_ALL = """
import importlib, pkgutil, sys
import headrace
from headrace.extras import extra_of
sys.argv = ["headrace"]
for module in pkgutil.walk_packages(headrace.__path__, "headrace."):
    if module.name.endswith("__main__") or module.name == "headrace.envs.jsonl_qa.compare":
        continue  # these run when they are imported
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name != "pytest" and extra_of(error.name) is None:
            raise
"""


def python_of(version: str) -> str:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} is on the path or in pyenv: not tried with it")
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_the_whole_set_is_wheels_and_every_one_is_pinned(version: str, uv: Path) -> None:
    """For its first release too: Debian 12 has 3.11.2, for which some libraries do not come any more."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [part for extra in extras if extra != "gym" for part in ("--extra", extra)]
    options, variables = uv_settings()
    command = [str(uv), "pip", "compile", "--quiet", "--no-header", "--no-annotate", *options, *wanted]
    command += ["--python", python_of(version), "--python-version", f"{version}.0", "pyproject.toml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    pins = {_name(line) for line in CONSTRAINTS.read_text().splitlines() if "==" in line}
    assert [line for line in done.stdout.splitlines() if "==" in line and _name(line) not in pins] == []


@pytest.mark.parametrize("version", [version for version in VERSIONS if not sys.version.startswith(version)])
def test_what_needs_no_torch_runs(version: str, built: Path, uv: Path, tmp_path: Path) -> None:
    clean = Clean.made(tmp_path / "venv", python_of(version), pip=False)
    (wheel,) = built.glob("*.whl")
    clean.install(uv, str(wheel), *TOOLS)
    assert clean.headrace("--help").returncode == 0
    assert clean.headrace("doctor").returncode == 0
    imported = clean.python("-c", IMPORT_ALL)
    assert imported.returncode == 0, imported.stderr
    done = clean.python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", *SUITE, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-3000:]


def _name(line: str) -> str:
    return re.sub(r"[._]", "-", re.split(r"[=; ]", line, maxsplit=1)[0]).lower()
