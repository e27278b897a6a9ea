"""Every part of `headrace bench api` at sizes at which the figures mean nothing, and their shape everything."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from headrace.bench.api import load, measure
from headrace.bench.api.load import ApiSizes, GroupBodies
from headrace.bench.api.measure import BARS, RATIOS, measure_sizes

TINY = ApiSizes(
    "tiny",
    group_size=2,
    tokens=8,
    batch_size=8,
    flow_groups=8,
    flow_rounds=1,
    few_groups=20,
    many_groups=40,
    many_shared_groups=40,
    flat_tokens=8,
    flat_rounds=2,
    kept_groups=20,
)
#: Ours under the original's name.
STAND_IN = "import sys\nfrom headrace.cli import main\nmain(['api', *sys.argv[1:]])\n"


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(load.PYTHON_VARIABLE, raising=False)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


@pytest.mark.long
@pytest.mark.usefixtures("nothing_installed")
def test_without_the_original_ours_is_measured_alone_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measure_sizes(TINY, tmp_path).as_dict()
    assert set(found) - {"absolute", "environment"} == set(BARS)
    assert all(found[key] >= 0 for key in BARS)
    assert found["environment"]["original"] == "not installed"
    assert found["absolute"]["flow_ours_groups_s"] > 0
    assert "the original is not installed" in " ".join(capsys.readouterr().err.split())


def test_with_the_original_both_take_the_same_load_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "atroposlib" / "cli"
    package.mkdir(parents=True)
    (package / "run_api.py").write_text(STAND_IN)
    monkeypatch.setenv(load.PYTHON_VARIABLE, sys.executable)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    found = measure.flow(TINY, tmp_path)
    assert set(found.ratios) == set(RATIOS)
    assert all(value > 0 for value in [*found.ratios.values(), *found.absolute.values()])


@pytest.mark.usefixtures("nothing_installed")
def test_the_original_is_the_one_that_the_tests_made(tmp_path: Path) -> None:
    python = tmp_path / "cache" / "venvs" / "atropos-0123456789ab" / "bin" / "python"
    assert load.original_python() is None
    python.parent.mkdir(parents=True)
    python.touch()
    assert load.original_python() == python


def test_a_group_has_its_number_first_and_what_environments_send() -> None:
    group = json.loads(GroupBodies(2, 8).body(7, 3))
    assert (group["tokens"][0][0], group["env_id"]) == (7, 3)
    assert [len(row) for row in group["tokens"] + group["masks"] + group["inference_logprobs"]] == [8] * 6
    assert group["masks"][1] == [-100, -100, *group["tokens"][1][2:]]
