"""`headrace demo`: honest, quick, and able to fail."""

from __future__ import annotations

import json
import os
import pty
import random
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import COMMAND, Command, spawn

from headrace.demo.game import GUESSES, ID, OPENING, play_out
from headrace.demo.score import Score
from headrace.pool.readonly import JournalView


def test_the_demo_survives_the_crash_and_says_that_nothing_is_trained(tmp_path: Path) -> None:
    done = spawn("demo", "--groups", "8", "--journal", tmp_path / "journal")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "Headrace: the pool at work. No training yet: the trainer comes later"
    assert any(line.startswith("kill -9 ") for line in lines)
    assert [line.split(":")[0].strip() for line in lines if line.startswith("  ledger ")] == [
        "ledger before the kill",
        "ledger in the journal",
        "ledger at the end",
    ]
    verdict = json.loads(lines[-1])
    assert (verdict["groups"], verdict["lost"], verdict["balanced"]) == (8, 0, True)
    assert 8 * 8 <= verdict["steps"] <= 8 * 8 * GUESSES
    assert 0 < verdict["recovered"] <= verdict["steps"]
    assert verdict["seconds"] > 0
    with JournalView(tmp_path / "journal") as view:
        assert view.stats()["ledger"]["consumed"] == verdict["steps"]


def test_a_terminal_sees_the_demo_live() -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": "120", "LINES": "40", "TERM": "xterm"}
    process = subprocess.Popen([*COMMAND, "demo", "--groups", "4"], stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    said = b""
    while True:
        try:
            said += os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other side is gone
            break
    os.close(ours)
    assert process.wait(30) == 0
    shown = said.decode()
    assert "No training yet" in shown
    assert "4 of 4 groups consumed" in shown
    assert json.loads(shown.splitlines()[-1].rpartition("\x1b[?25h")[2])["balanced"] is True


def test_a_folder_with_something_in_it_is_not_played_on(headrace: Command, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = headrace("demo", "--journal", tmp_path)
    assert done.code == 2
    assert "is not empty" in done.err


def test_a_loss_makes_the_demo_fail(headrace: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer is made to overlook one step: the demo must notice, say so, and exit with 1."""
    took = Score.took

    def careless(self: Score, steps: list[Any], groups: int, redelivered: int) -> None:
        took(self, steps[1:] if not self.consumed else steps, groups, redelivered)

    monkeypatch.setattr(Score, "took", careless)
    done = headrace("demo", "--groups", "4")
    assert done.code == 1
    assert json.loads(done.out.splitlines()[-1])["lost"] == 1


def test_other_tokens_than_were_sent_count_as_lost() -> None:
    score = Score(wanted=1)
    first, *_ = play_out("t", "p", 1, random.Random(0))
    other, *_ = play_out("t", "p", 1, random.Random(1))
    assert first.response_ids.tolist() != other.response_ids.tolist()
    score.sent(first)
    score.took([other], 1, 0)
    assert score.lost() == 1


@pytest.mark.parametrize("hidden", range(1, 8))
def test_the_game_ends_with_a_hit_or_after_three_guesses(hidden: int) -> None:
    for seed in range(20):
        steps = list(play_out("t", "p", hidden, random.Random(seed)))
        assert [step.step_index for step in steps] == list(range(len(steps)))
        assert [step.is_last for step in steps] == [False] * (len(steps) - 1) + [True]
        hit = steps[-1].response_ids.tolist() == [ID[str(hidden)], ID["<end>"]]
        assert steps[-1].reward == float(hit)
        assert hit or len(steps) == GUESSES
        assert steps[0].prompt_ids.tolist() == list(OPENING)
        for before, after in pairwise(steps):
            so_far = [*before.prompt_ids.tolist(), *before.response_ids.tolist()]
            guess = before.response_ids[0] - ID["1"] + 1
            hint = ID["higher"] if hidden > guess else ID["lower"]
            assert after.prompt_ids.tolist() == [*so_far, hint]
