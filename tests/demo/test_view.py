"""What is shown of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.demo.test_games import played
from tests.demo.test_games import write as write_games

from headrace.data.visible import INVISIBLE
from headrace.demo import games
from headrace.demo.games import AgentCounters
from headrace.demo.progress import DemoProgress
from headrace.demo.view import DemoView
from headrace.run.progress import averaged
from headrace.run.stack import StartLog
from headrace.run.view import curve
from headrace.terminal import braille


def write(run: Path, *rewards: float) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        for reward in rewards:
            row: dict[str, Any] = {
                "reward": reward,
                "queue": 3,
                "staleness_mean": 0.5,
                "tokens_s": 1234.0,
                "seconds": 2,
            }
            file.write(json.dumps(row) + "\n")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(run: Path, *rewards: float, width: int = 80, ended: bool = False, after_s: float = 0.0) -> list[str]:
    """The lines of the live view of a run, so many seconds after it began to show its last game."""
    write(run, *rewards)
    progress = DemoProgress(run, run)
    progress.refresh()
    clock, console = Clock(), Console(file=io.StringIO(), width=width, record=True)
    view = DemoView(console, progress, steps=400, clock=clock)
    view.update()
    clock.now = after_s
    if ended:
        view.finish()
    console.export_text(clear=True)
    console.print(view.panel(ended=ended))
    return console.export_text().replace("\N{NO-BREAK SPACE}", " ").splitlines()


def test_a_moving_average_is_of_what_there_is() -> None:
    assert averaged([0.0, 1.0, 1.0, 1.0], window=2) == [0.0, 0.5, 1.0, 1.0]


def test_progress_reads_whole_lines_as_they_come(tmp_path: Path) -> None:
    progress = DemoProgress(tmp_path, tmp_path)
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
    progress = DemoProgress(tmp_path, tmp_path)
    progress.refresh()
    first = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (tmp_path / "metrics.jsonl").write_text(first)
    progress.refresh()
    assert progress.rewards == [0.1]


@pytest.mark.parametrize(("rewards", "learned"), [([0.95] * 10, True), ([0.95] * 9, False), ([0.94] * 10, False)])
def test_ten_steps_at_the_bar_are_enough(tmp_path: Path, rewards: list[float], learned: bool) -> None:
    write(tmp_path, *rewards)
    progress = DemoProgress(tmp_path, tmp_path)
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
    games.write_counters(tmp_path, AgentCounters(calls=4321))
    progress = DemoProgress(tmp_path, tmp_path)
    progress.refresh()
    screen = io.StringIO()
    with DemoView(Console(file=screen, force_terminal=True, color_system=None, width=120), progress, steps=40) as view:
        view.update()
    shown = screen.getvalue()
    for words in ("step 2 of at most 40", "0.500", "3\N{NO-BREAK SPACE}groups", "1,234", "4,321"):
        assert words in shown


def test_elsewhere_a_line_is_told_every_ten_steps(tmp_path: Path) -> None:
    progress = DemoProgress(tmp_path, tmp_path)
    said = io.StringIO()
    with DemoView(Console(file=said, width=200), progress, steps=40) as view:
        for _ in range(20):
            write(tmp_path, 0.5)
            progress.refresh()
            view.update()
    assert [line.split(":")[0] for line in said.getvalue().splitlines()] == ["step 1", "step 10", "step 20"]


@pytest.mark.parametrize("width", [50, 80, 100, 200])
def test_the_view_fits_the_terminal_and_has_bar_and_axes(tmp_path: Path, width: int) -> None:
    lines = shown(tmp_path, *(n / 100 for n in range(90)), width=width)
    assert max(map(len, lines)) == min(width, 100)
    (at_the_bar,) = [line for line in lines if " 0.95 │" in line]
    assert "1.00 ┤╌╌╌" in at_the_bar
    for tick in ("0.75 ┤", "0.50 ┤", "0.25 ┤", "0.00 ┤"):
        assert any(tick in line for line in lines), tick
    axis = next(n for n, line in enumerate(lines) if "└─" in line and "┴" in line)
    assert lines[axis + 1].strip("│ ").split()[0] in ("20", "50")


@pytest.mark.parametrize("steps", [100, 500])
def test_a_step_stands_where_the_axis_says(steps: int) -> None:
    lines = [line.plain for line in curve([0.0] * 99 + [1.0] * (steps - 99), 80)]
    first = next(at for at, letter in enumerate(lines[0]) if 0x2800 < ord(letter) < 0x2900)
    numbers = lines[9].split()
    ticks = [at for at, letter in enumerate(lines[8]) if letter == "┴"]
    assert abs(first - ticks[numbers.index("100")]) <= 1


def test_the_time_left_is_told_from_the_speed_of_the_curve(tmp_path: Path) -> None:
    lines = shown(tmp_path, *(0.01 * n for n in range(60)))
    # 0.54 is reached: 0.41 are left, 0.01 a step, two seconds each.
    assert any("about a minute left at this pace" in line for line in lines)


@pytest.mark.parametrize("rewards", [[0.1 * n for n in range(9)], [0.4] * 60])
def test_nothing_is_said_of_the_time_left_where_it_cannot_be_known(tmp_path: Path, rewards: list[float]) -> None:
    assert not any("left" in line for line in shown(tmp_path, *rewards))


def test_no_more_time_is_left_than_all_steps_take(tmp_path: Path) -> None:
    write(tmp_path, *(0.001 * n for n in range(0, 120, 2)))
    progress = DemoProgress(tmp_path, tmp_path)
    progress.refresh()
    assert progress.seconds_left(most=70) == pytest.approx(20)


def test_a_run_that_learned_early_ends_with_its_bar_full(tmp_path: Path) -> None:
    lines = shown(tmp_path, *[0.97] * 12, ended=True)
    assert any("learned in 12 steps" in line for line in lines)
    assert any(line.count("━") == 76 for line in lines)
    assert "╺" not in "".join(lines)


@pytest.mark.parametrize(("after_s", "turns"), [(0.0, 1), (0.6, 2), (1.1, 3)])
def test_a_game_is_shown_turn_by_turn(tmp_path: Path, after_s: float, turns: int) -> None:
    write_games(tmp_path, played(0, 5, "4", "6", "5"))
    (line,) = [line for line in shown(tmp_path, 0.5, after_s=after_s) if "a game" in line]
    whole = ["hidden 5", "4 higher", "6 lower", "5 hit"]
    assert [part for part in whole if part in line] == whole[: turns + 1]


def test_the_last_game_is_whole_at_the_end(tmp_path: Path) -> None:
    write_games(tmp_path, played(0, 5, "1", "2", "3"))
    assert any("hidden 5 · 1 higher · 2 higher · 3 missed" in line for line in shown(tmp_path, 0.5, ended=True))


def test_what_an_agent_said_has_no_power_over_the_terminal(tmp_path: Path) -> None:
    write_games(tmp_path, played(0, 5, "4\x1b[2J\x9b2J\u202e"))
    lines = shown(tmp_path, 0.5, ended=True)
    assert any("4<U+001B>[2J<U+009B>2J<U+202E>" in line for line in lines)
    assert not any(INVISIBLE.search(line) for line in lines)
    console = Console(file=io.StringIO(), record=True)
    StartLog(console).say("a process said:\n\x1b]0;evil\x07")
    assert console.export_text() == "a process said:\n<U+001B>]0;evil<U+0007>\n"
