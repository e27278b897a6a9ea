"""What a run says of itself at its end, also where nothing ever had a reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.run.chart import ChartLine, chart, write_png
from headrace.run.run import _closing


@pytest.mark.parametrize(("rewards", "held_out"), [([], []), ([], [(2, 0.5)]), ([0.5], [])])
def test_a_picture_has_no_curve_of_what_has_no_points(
    rewards: list[float], held_out: list[tuple[int, float]], tmp_path: Path
) -> None:
    marks = chart(rewards, "reward by training step", held_out=held_out)
    assert all(mark.points for mark in marks if isinstance(mark, ChartLine))
    write_png(marks, tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("reward", "said"), [(None, "-"), (0.25, "0.250")])
def test_the_last_lines_tell_the_reward_where_there_was_one(reward: float | None, said: str, tmp_path: Path) -> None:
    verdict = {"reward_start": reward, "reward_end": reward, "steps": 3, "seconds": 2.0}
    first, *_ = _closing(verdict, tmp_path / "report.html", tmp_path, learned=True)
    assert first == f"3 steps in 2 s: reward {said} at the start, {said} at the end"
