"""What is shown of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.braille import braille
from headrace.demo import counters
from headrace.demo.counters import Counters
from headrace.demo.progress import Progress, averaged
from headrace.demo.view import View


def write(run: Path, *rewards: float) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for reward in rewards:
            row: dict[str, Any] = {"reward": reward, "queue": 3, "staleness_mean": 0.5, "tokens_s": 1234.0}
            file.write(json.dumps(row) + "\n")


def test_a_moving_average_is_of_what_there_is() -> None:
    assert averaged([0.0, 1.0, 1.0, 1.0], window=2) == [0.0, 0.5, 1.0, 1.0]


def test_progress_reads_whole_lines_as_they_come(tmp_path: Path) -> None:
    progress = Progress(tmp_path, tmp_path)
    assert not progress.refresh()
    write(tmp_path, 0.1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"reward": 0.')
    assert progress.refresh()
    assert progress.rewards == [0.1]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("5}\n")
    assert progress.refresh()
    assert progress.rewards == [0.1, 0.5]


def test_a_file_that_a_resumed_trainer_has_cut_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, 0.1, 0.2, 0.3)
    progress = Progress(tmp_path, tmp_path)
    progress.refresh()
    first = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (tmp_path / "metrics.jsonl").write_text(first)
    progress.refresh()
    assert progress.rewards == [0.1]


@pytest.mark.parametrize(("rewards", "learned"), [([0.95] * 10, True), ([0.95] * 9, False), ([0.94] * 10, False)])
def test_ten_steps_at_the_bar_are_enough(tmp_path: Path, rewards: list[float], learned: bool) -> None:
    write(tmp_path, *rewards)
    progress = Progress(tmp_path, tmp_path)
    progress.refresh()
    assert progress.learned is learned


def test_a_curve_rises_from_the_lower_left_to_the_upper_right() -> None:
    assert braille([0.0, 0.3, 0.6, 1.0], width=2, height=1) == ["⡠⠊"]


def test_more_values_than_dots_are_thinned_out() -> None:
    lines = braille([n / 999 for n in range(1000)], width=10, height=2)
    assert [len(line) for line in lines] == [10, 10]
    assert lines[0][0] == lines[1][-1] == "⠀"


def test_a_terminal_sees_bar_curve_and_figures(tmp_path: Path) -> None:
    write(tmp_path, 0.25, 0.75)
    counters.write(tmp_path, Counters(calls=4321))
    progress = Progress(tmp_path, tmp_path)
    progress.refresh()
    screen = io.StringIO()
    with View(Console(file=screen, force_terminal=True, width=120), progress, steps=40) as view:
        view.update()
    shown = screen.getvalue()
    for words in ("step 2 of at most 40", "0.500", "3 groups", "1,234", "4,321"):
        assert words in shown


def test_elsewhere_a_line_is_told_every_ten_steps(tmp_path: Path) -> None:
    progress = Progress(tmp_path, tmp_path)
    said = io.StringIO()
    with View(Console(file=said, width=200), progress, steps=40) as view:
        for _ in range(20):
            write(tmp_path, 0.5)
            progress.refresh()
            view.update()
    assert [line.split(":")[0] for line in said.getvalue().splitlines()] == ["step 1", "step 10", "step 20"]
