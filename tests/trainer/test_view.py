"""What one sees of a run: lines where there is no terminal, a panel where there is one."""

from __future__ import annotations

import logging
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.trainer import TrainerConfig
from headrace.trainer.checkpoint import Progress
from headrace.trainer.examples import SkippedCounts
from headrace.trainer.reporting import AWAITING_BATCH
from headrace.trainer.skipped import SKIP_REASONS
from headrace.trainer.view import TrainView


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def row(step: int, **changes: Any) -> dict[str, Any]:
    given = {"step": step, "reward": step / 100, "entropy": 1.5, "staleness_mean": 0.5, "tokens_s": 1234.0, "queue": 7}
    counts = {"groups": 4, "skipped_zero_variance": 0, "seconds": 2.0, "times": {"wait": 0.5, "learn": 1.25}}
    return {**given, **counts, **changes}


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    return TrainerConfig.model_validate({"model": tmp_path, "run": tmp_path, "steps": 50, "stop_window": 2})


def lines(config: TrainerConfig, clock: Clock) -> tuple[TrainView, StringIO]:
    file = StringIO()
    return TrainView(Console(file=file, width=100), config, clock=clock), file


def test_elsewhere_than_in_a_terminal_a_line_is_written_every_ten_steps(config: TrainerConfig) -> None:
    view, file = lines(config, Clock())
    view.ready(Progress(step=0, version=3))
    for step in range(1, 23):
        view.step(row(step))
    first, *told = file.getvalue().splitlines()
    assert first == "trainer ready at step 0, version 3"
    assert [line.split(":")[0] for line in told] == [f"step {n} of at most 50" for n in (1, 11, 21)]
    assert told[-1].endswith(
        "reward 0.205, entropy 1.50, staleness 0.50, tokens/s 1,234, queue 7 groups, "
        "step 2.00 s, of which wait 0.50 s, learn 1.25 s, publish 0.00 s"
    )


def test_what_filters_left_out_is_told_by_their_names(config: TrainerConfig) -> None:
    view, file = lines(config, Clock())
    for step in range(1, 12):
        view.step(row(step, filtered_overlong=2, filtered_short=0))
    assert "22 trajectories by the filter overlong" in file.getvalue()
    assert "filter short" not in file.getvalue()


def test_where_nothing_is_rewarded_the_loss_is_told(config: TrainerConfig) -> None:
    view, file = lines(config, Clock())
    view.step(row(1, reward=None, loss=2.5))
    assert "step 1 of at most 50: loss 2.500, entropy 1.50" in file.getvalue()


def test_slow_steps_are_told_each(config: TrainerConfig) -> None:
    clock = Clock()
    view, file = lines(config, clock)
    for step in range(1, 4):
        clock.now += 60
        view.step(row(step))
    assert len(file.getvalue().splitlines()) == 3


def test_a_wait_for_groups_is_told_after_a_while_and_then_once_a_minute(config: TrainerConfig) -> None:
    clock = Clock()
    view, file = lines(config, clock)
    view.doing(AWAITING_BATCH)
    for second in range(121):
        clock.now = float(second)
        view.groups(f"{second} of 999 groups ready in channel train")
    said = file.getvalue().splitlines()
    assert said == [f"waiting for a batch: {n} of 999 groups ready in channel train" for n in (5, 65)]


def test_nothing_is_told_of_groups_while_a_batch_is_learned_from(config: TrainerConfig) -> None:
    clock = Clock()
    view, file = lines(config, clock)
    view.doing("learning from 4 groups")
    clock.now = 100.0
    view.groups("1 of 4 groups ready in channel train")
    assert not file.getvalue()


def test_a_terminal_shows_the_curve_the_figures_what_is_waited_for_and_the_log(config: TrainerConfig) -> None:
    file = StringIO()
    with TrainView(Console(file=file, force_terminal=True, width=100, height=40), config, clock=Clock()) as view:
        view.ready(Progress())
        for step in range(1, 30):
            view.step(row(step, reward=step - 10.0, skipped_zero_variance=1))
        view.down("gateway", "the gateway http://g: connection refused")
        logging.getLogger("headrace.trainer").warning("something to know")
        view.stopping("SIGTERM")
    shown = file.getvalue()
    for words in (
        "trainer ready at step 0, version 0",
        "step 29 of at most 50",
        "waiting for the gateway http://g: connection refused",
        "WARNING headrace.trainer: something to know",
        "stopping (SIGTERM)",
        "skipped out of 116 groups: 29 groups with equal rewards only",
        "1,234",
        "18.5",  # the curve's highest: rewards are not always between 0 and 1
    ):
        assert words in shown
    assert not [handler for handler in logging.getLogger().handlers if type(handler).__name__ == "_Above"]


def test_what_is_skipped_is_named_with_its_reason_and_count_and_added_up(config: TrainerConfig) -> None:
    clock = Clock()
    view, file = lines(config, clock)
    view.step(row(1))
    for step in (2, 3):
        clock.now += 60
        view.step(row(step, skipped_media=6, skipped_long=1, skipped_unrewarded=1, masked_truncated=step))
    first, second, third = file.getvalue().splitlines()
    assert "skipped" not in first
    assert second.endswith(
        "; skipped out of 8 groups: 1 trajectory without a reward; 1 sequence longer than max_length; "
        "6 sequences with images or other media, which this model does not read; "
        "2 answers that ended by the token limit"
    )
    assert "skipped out of 12 groups: 2 trajectories without a reward; 2 sequences longer" in third
    assert "12 sequences with images" in third


def test_a_terminal_names_what_is_skipped_though_nothing_has_a_reward_yet(config: TrainerConfig) -> None:
    file = StringIO()
    with TrainView(Console(file=file, force_terminal=True, width=120, height=40), config, clock=Clock()) as view:
        view.step(row(1, reward=None, skipped_unrewarded=16, skipped_misaligned=2))
    assert "skipped out of 4 groups: 16 trajectories without a reward; 2 sequences whose advantages" in file.getvalue()


def test_every_count_of_what_a_batch_skips_has_its_reason() -> None:
    assert {*SkippedCounts().metrics(), "skipped_repeated"} == set(SKIP_REASONS)
