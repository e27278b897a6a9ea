"""A wheel of this tree in a clean environment: every command answers, or names what it lacks and how to get it."""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from tests.install.kit import Clean

COMMANDS = (
    "api",
    "bench",
    "check-gateway",
    "check-model",
    "demo",
    "doctor",
    "engine",
    "gateway",
    "pool",
    "reward",
    "serve",
    "train",
)

#: What lacks something in an installation without extras: a real start, and the libraries that it asks for.
LACKING = [
    (("demo",), ("torch", "transformers", "renderers")),
    (("demo", "--ray"), ("torch", "renderers", "ray")),
    (("engine", "--port", "0"), ("torch", "transformers")),
    (("train", "none.yaml"), ("torch", "transformers")),
    (("gateway", "--port", "0", "--vllm-addresses", "http://127.0.0.1:9", "--tokenizer-path", "."), ("renderers",)),
    (("serve", "--port", "0", "--vllm-addresses", "http://127.0.0.1:9", "--tokenizer-path", "."), ("renderers",)),
    (("pool", "start"), ("ray",)),
    (("pool", "stats", "ray-actor://data_pool"), ("ray",)),
    (("bench", "pool", "--quick"), ("ray",)),
    (("bench", "gateway", "--quick"), ("ray", "renderers")),
    (("bench", "trainer", "--quick"), ("torch", "renderers")),
    (("env", "number_guess", "probe"), ("tokenizers",)),
]


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


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("env",)], ids=" ".join)
def test_help_needs_no_extra(core: Clean, command: tuple[str, ...]) -> None:
    done = core.headrace(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: headrace" in done.stdout


@pytest.mark.parametrize(("command", "names"), LACKING, ids=lambda value: " ".join(value))
def test_what_needs_an_extra_says_so_at_once_and_how_it_is_installed(
    core: Clean, command: tuple[str, ...], names: tuple[str, ...], tmp_path: Path
) -> None:
    done = core.headrace(*command, cwd=tmp_path)
    assert done.returncode == 1
    assert all(name in done.stderr for name in names)
    assert re.search(r"pip install \S+headrace-\S+\.whl\[[a-z,]+\]", done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [*tmp_path.iterdir()] == []  # nothing was begun


def test_the_doctor_works_without_any_extra_and_says_what_is_missing(core: Clean) -> None:
    done = core.headrace("doctor", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    lacking = {command["name"]: command["missing"] for command in found["commands"]}
    assert lacking["api"] == []
    assert "torch" in lacking["demo"]
    assert found["broken"] == []
    assert {library["name"]: library["tested"] for library in found["libraries"]}["torch"]


def test_the_hint_installs_what_is_missing_and_probe_then_needs_nothing_more(core: Clean, tmp_path: Path) -> None:
    hint = core.headrace("env", "number_guess", "probe").stderr.strip().partition("pip install ")[2]
    core.shell(f"pip install --quiet {hint}")
    done = core.headrace("env", "number_guess", "probe", "--items", "1", "--json", "report.json", cwd=tmp_path)
    assert done.returncode in (0, 3), done.stderr  # 3: it found something about the reward
    assert json.loads((tmp_path / "report.json").read_text())
    assert core.python("-c", "import pytest").returncode == 1
