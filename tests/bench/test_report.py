"""What a run of a benchmark leaves behind, whatever it measured."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import bench
from headrace.bench.pool import measure
from headrace.bench.pool.measure import BARS
from headrace.bench.report import Bar, BenchReport, Figures
from headrace.bench.timing import in_turn
from headrace.data.errors import InvalidInput


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> BenchReport:
    """A report as a run of the pool's benchmark would return it, without the run."""
    report = BenchReport("pool", BARS)
    report.add(
        Figures({key: 1.23456789 for key in reversed(BARS)}, {"durable_submit_ms": 0.5, "steps_per_s": 12_345.678})
    )
    monkeypatch.setattr(measure, "measure", lambda quick: report)
    return report


@pytest.mark.usefixtures("measured")
def test_the_json_has_the_ratios_as_plain_numbers_at_the_top(tmp_path: Path) -> None:
    assert bench.benchmark("pool", quick=True, json_path=tmp_path / "found.json") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == [*BARS, "absolute", "environment"]
    assert all(found[key] == 1.2346 for key in BARS)
    assert found["absolute"] == {"durable_submit_ms": 0.5, "steps_per_s": 12_345.678}


def test_the_environment_tells_versions_and_neither_host_nor_path(measured: BenchReport) -> None:
    environment = measured.as_dict()["environment"]
    assert environment["python"] == platform.python_version()
    assert environment["cpus"] >= 1
    assert {"headrace", "numpy"} <= set(environment["versions"])
    text = json.dumps(environment)
    assert platform.node() not in text or not platform.node()
    assert "/" not in text
    assert getpass.getuser() not in environment.values()


@pytest.mark.usefixtures("measured")
def test_the_table_shows_every_key_with_its_bar(capsys: pytest.CaptureFixture[str]) -> None:
    bench.benchmark("pool")
    shown = capsys.readouterr().out
    for key, bar in BARS.items():
        assert key in shown
        assert str(bar) in shown


def test_a_key_that_was_not_measured_is_an_error_and_not_a_hole(measured: BenchReport) -> None:
    del measured.ratios["fetch_flat"]
    with pytest.raises(KeyError, match="fetch_flat"):
        measured.as_dict()


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="no benchmark 'pond'; known: pool"):
        bench.benchmark("pond")


def test_a_file_that_could_not_be_written_is_an_error_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no folder"):
        bench.benchmark("pool", json_path=tmp_path / "nowhere" / "found.json")


def test_the_module_runs_as_a_program() -> None:
    ended = subprocess.run([sys.executable, "-m", "headrace.bench", "pond"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "known: pool" in ended.stderr


@pytest.mark.parametrize(
    ("bar", "good", "bad"), [(Bar("a rate", at_least=5), 5.0, 4.99), (Bar("a cost", at_most=1.5), 1.5, 1.51)]
)
def test_a_bar_is_met_from_its_own_side(bar: Bar, good: float, bad: float) -> None:
    assert bar.met(good)
    assert not bar.met(bad)


def test_sides_take_turns_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    first, second = in_turn(lambda: side("a"), lambda: side("b"), 2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert (first, second) == ([3.0, 5.0], [4.0, 6.0])


def test_a_small_figure_is_not_rounded_to_nothing() -> None:
    report = BenchReport("trainer", {"gap": Bar("a difference", at_most=1e-5)})
    report.add(Figures({"gap": 1.34567e-7}, {"other": 0.123456}))
    found = report.as_dict()
    assert (found["gap"], found["absolute"]["other"]) == (1.346e-7, 0.1235)
