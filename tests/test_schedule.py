"""How tests are shared out and tables thinned: by names that the tests have, so that a renamed one is noticed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cached import made_once
from tests.matrix import crossed, paired, usual
from tests.schedule import APART, OTHER_HALF, VLLM, share_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("test", "share"),
    [
        ("tests/pool/test_wire.py::test_it[http]", "tests/pool/test_wire.py"),
        ("tests/pool/test_conformance_fetch.py::test_it[ray]", "ray"),
        ("tests/trainer/test_arrays.py::test_it", "tests/trainer/test_arrays.py"),
        ("tests/demo/test_run.py::test_it[one]", "tests/demo/test_run.py::test_it[one]"),
        ("tests/vllm/test_chat.py::test_it", VLLM),
        ("tests/vllm/test_lora.py::test_it", "tests/vllm/test_lora.py"),
    ],
)
def test_a_test_is_of_one_share(test: str, share: str) -> None:
    assert share_of(test) == share


@pytest.mark.parametrize("place", [*APART, *OTHER_HALF])
def test_what_the_shares_name_is_there(place: str) -> None:
    path, _, name = place.partition("::")
    assert f"def {name}" in (ROOT / path).read_text()


CONFTEST = """
from tests.schedule import ByFile

def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
"""
#: A share whose worker ends in a test of it, once all others are done.
ENDS = """
import os, pathlib, time

def done(*names):
    while not all(pathlib.Path(name).exists() for name in names):
        time.sleep(0.01)

def test_first():
    pass

def test_ends_its_worker():
    done("b", "c")
    os._exit(1)

def test_after_it():
    pathlib.Path("ran").touch()
"""
PLAIN = """
import pathlib

def test_one():
    pass

def test_two():
    pathlib.Path("{name}").touch()
"""


@pytest.mark.parametrize("last", [True, False], ids=["it is the last", "others follow"])
def test_a_worker_that_ends_in_a_test_fails_that_and_no_other_and_the_run_ends(tmp_path: Path, last: bool) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_d.py").write_text(ENDS.partition("def test_after_it")[0] if last else ENDS)
    for name in "abc":  # `a` comes first, so that a share is done at each worker before
        (tmp_path / f"test_{name}.py").write_text(PLAIN.format(name=name))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    flags = ["-q", "-p", "xdist.plugin", "-n", "2", "-c", os.devnull, "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *flags, "."]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    counts = re.findall(r"(\d+) (failed|passed)", done.stdout)
    assert [(int(count), what) for count, what in counts] == [(1, "failed"), (7 if last else 8, "passed")], done.stdout
    assert (tmp_path / "ran").exists() != last


def test_a_crossed_table_has_every_value_and_in_the_long_tier_every_combination() -> None:
    rows = crossed([1, 2, 3], ["a", "b"])
    assert [row.values for row in rows] == [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "a"), (3, "b")]
    assert [row.values for row in rows if not row.marks] == [(1, "a"), (1, "b"), (2, "a"), (3, "a")]


def test_a_paired_table_keeps_what_stands_at_the_same_place() -> None:
    rows = paired([1, 2], ["a", "b"])
    assert [row.values for row in rows] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert [row.values for row in rows if not row.marks] == [(1, "a"), (2, "b")]


def test_of_a_usual_table_the_first_row_runs_always() -> None:
    rows = usual([1, 2], ["a", "b"])
    assert [row.values for row in rows] == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]
    assert [row.values for row in rows if not row.marks] == [(1, "a")]


def test_what_is_made_once_is_found_again_and_begun_anew_where_it_failed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def fail(folder: Path) -> None:
        raise OSError(f"no room in {folder}")

    with pytest.raises(OSError, match="no room"):
        made_once(tmp_path_factory, "test-of-once", fail)
    found = made_once(tmp_path_factory, "test-of-once", lambda folder: (folder / "made").touch())
    assert made_once(tmp_path_factory, "test-of-once", fail) == found
    assert [path.name for path in found.iterdir()] == ["made"]
