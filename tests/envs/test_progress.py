"""What is shown of an environment while it works."""

from __future__ import annotations

import io

from rich.console import Console

from headrace.envs.metrics import Counts
from headrace.envs.progress import LINE_INTERVAL_S, ProgressState, ProgressView, Scores


def standing(done: int) -> ProgressState:
    return ProgressState(done, 40, "groups", scores=[0.25, 0.75], figures={"score": "0.500", "workers": "3 of 8"})


def test_a_terminal_sees_bar_curve_and_figures() -> None:
    screen = io.StringIO()
    with ProgressView(Console(file=screen, force_terminal=True, width=120), "words") as view:
        view.update(standing(2))
    shown = screen.getvalue()
    for words in ("words: mean score", "2 of 40 groups", "0.75", "0.500", "3 of 8"):
        assert words in shown


def test_elsewhere_a_line_is_told_now_and_then_and_at_the_end() -> None:
    said, now = io.StringIO(), [0.0]
    with ProgressView(Console(file=said, width=200), "words", clock=lambda: now[0]) as view:
        for done in range(1, 7):
            view.update(standing(done))
            now[0] += LINE_INTERVAL_S / 2
        view.update(standing(6))
    assert [line.split(" of ")[0] for line in said.getvalue().splitlines()] == [f"words: {n}" for n in (1, 3, 5, 6)]


def test_nothing_new_is_not_told_again() -> None:
    said, now = io.StringIO(), [0.0]
    with ProgressView(Console(file=said, width=200), "words", clock=lambda: now[0]) as view:
        for _ in range(3):
            view.update(standing(1))
            now[0] += LINE_INTERVAL_S
    assert len(said.getvalue().splitlines()) == 1


def test_scores_are_those_of_what_came_in_between_two_looks() -> None:
    counts = Counts()
    scores = Scores(counts)
    scores.update()
    assert (list(scores.means), scores.recent) == ([], "-")
    counts.sequences, counts.scores = 4, 1.0
    scores.update()
    scores.update()
    counts.sequences, counts.scores = 6, 3.0
    scores.update()
    assert (list(scores.means), scores.recent) == ([0.25, 1.0], "0.625")
