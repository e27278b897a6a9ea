"""A wheel of this tree: what it says of itself, and what it does where nothing else is installed."""

from __future__ import annotations

import json
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

from tests.install.kit import Clean


def test_the_sdist_has_what_a_set_up_and_its_reader_need(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"README.md", "LICENSE", "Makefile", "constraints.txt", "pyproject.toml", "tools/setup.py"}
    assert needed - names == set()


def test_the_wheel_says_what_it_is_and_carries_the_versions_that_are_tested(built: Path) -> None:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        said = message_from_string(archive.read(metadata).decode())
        assert b"torch==" in archive.read("headrace/constraints.txt")
    assert said["Requires-Python"] == ">=3.11"
    assert said["Description-Content-Type"] == "text/markdown"
    assert str(said.get_payload()).startswith("# Headrace")
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= {
        *said.get_all("Classifier", [])
    }


def test_the_doctor_works_without_any_extra_and_says_what_is_missing(core: Clean) -> None:
    done = core.headrace("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    lacking = {command["name"]: command["missing"] for command in found["commands"]}
    assert lacking["api"] == []
    assert "torch" in lacking["demo"]
    assert found["broken"] == []
    assert {library["name"]: library["tested"] for library in found["libraries"]}["torch"]


def test_a_runs_dashboard_tells_ids_where_the_texts_need_an_extra(core: Clean, tmp_path: Path) -> None:
    made = core.python(
        "-c", "from headrace.pool.embedded import DataPool; DataPool(journal='journal').close()", cwd=tmp_path
    )
    assert made.returncode == 0, made.stderr
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    done = core.headrace("dashboard", ".", "--export", "page.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[tokens]" in done.stderr
    assert (tmp_path / "page.html").stat().st_size > 0


def test_the_hint_installs_what_is_missing_and_probe_then_needs_nothing_more(core: Clean, tmp_path: Path) -> None:
    hint = core.headrace("env", "number_guess", "probe").stderr.strip().partition("pip install ")[2]
    core.shell(f"pip install --quiet {hint}")
    done = core.headrace("env", "number_guess", "probe", "--items", "1", "--json", "report.json", cwd=tmp_path)
    assert done.returncode in (0, 3), done.stderr  # 3: it found something about the reward
    assert json.loads((tmp_path / "report.json").read_text())
    assert core.python("-c", "import pytest").returncode == 1
