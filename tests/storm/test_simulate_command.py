"""`headrace storm --simulate`: its last line is JSON, a seed that finds something is told with how to play it again,
and flags that mean nothing to it are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.command import Command

from headrace.storm.simulation import simulation
from headrace.version import __version__


@pytest.fixture
def headrace(capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(capfd)


def test_the_last_line_is_json_and_the_log_can_be_checked_again(headrace: Command, tmp_path: Path) -> None:
    flags = ("--simulate", "--seed", "2", "--seeds", "2", "--operations", "200", "--folder", tmp_path)
    done = headrace("storm", *flags)
    assert done.code == 0, done.err
    figures = json.loads(done.out.splitlines()[-1])
    assert (figures["seed"], figures["seeds"], figures["failed_seeds"]) == (2, 2, [])
    assert (figures["lost"], figures["twice"], figures["stuck"]) == (0, 0, 0)
    assert figures["operations"] >= 400
    assert figures["version"] == __version__
    again = headrace("storm", "--check", tmp_path / "seed-2")
    assert again.code == 0, again.err


def test_a_seed_that_finds_something_says_how_to_play_it_again(
    headrace: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "PATIENCE_S", 0.0)  # whatever is not over at the end is stuck
    done = headrace("storm", "--simulate", "--seed", "5", "--seeds", "1", "--operations", "100")
    assert done.code == 1
    assert "seed 5: stuck: " in done.err
    assert "headrace storm --simulate --seed 5 --seeds 1 --operations 100" in done.err
    assert json.loads(done.out.splitlines()[-1])["failed_seeds"] == [5]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--seeds", "3"), "--seeds is for a simulation; give --simulate with it"),
        (("--operations", "3"), "--operations is for a simulation"),
        (("--simulate", "--kills", "3"), "--kills is for a storm of real processes"),
        (("--simulate", "--quick"), "--quick is for a storm of real processes"),
        (("--simulate", "--patience-s", "3"), "--patience-s is for a storm of real processes"),
        (("--simulate", "--seeds", "0"), "seeds"),
    ],
)
def test_flags_that_mean_nothing_together_are_refused_by_name(
    headrace: Command, flags: tuple[str, ...], said: str
) -> None:
    done = headrace("storm", *flags)
    assert done.code == 2
    assert said in done.err
