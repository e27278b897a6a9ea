"""Rewards of completions, by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.rewards import CombinedReward, RewardFunction, registry
from headrace.rewards.registry import LegacyFunctionWrapper, RewardRegistry

THOUGHT = "<think>two and two</think> 4"


@pytest.mark.parametrize(
    ("name", "options", "completions", "more", "rewards"),
    [
        ("format", {}, [THOUGHT, "<ANSWER>4</ANSWER>", "4"], {}, [1, 1, 0]),
        ("format", {"require_all_tags": True, "weight": 2}, [THOUGHT, THOUGHT + "<answer>4</answer>"], {}, [0, 2]),
        ("r1", {}, [THOUGHT, "4", "<think></think> 4", "no"], {"solution": "4"}, [1.5, 1, 1, 0]),
        ("accuracy", {}, [r"\boxed{\frac{1}{2}}", "#### 0.5", r"\boxed{2}"], {"solution": "0.5"}, [1, 1, 0]),
        ("accuracy", {}, ["</think>" + r"\boxed{4}" * 7, r"\boxed{5}"], {"ground_truth": ["4", 5]}, [0, 1]),
        ("cascading_r1_math", {}, [r"<think>a</think> \boxed{4}", r"\boxed{4}"], {"solution": "4"}, [1.5, 1]),
        ("crossword_format", {}, ["1-Across: WORD", "WORD"], {}, [1, 0]),
        ("reasoning_steps", {}, ["Step 1: a\nStep 2: b\nStep 3: c", "4"], {}, [0.5, 0]),
        ("repetition_penalty", {}, ["too short"], {}, [-0.1]),
    ],
)
def test_a_reward_is_what_it_says(
    name: str, options: dict[str, Any], completions: list[Any], more: dict[str, Any], rewards: list[float]
) -> None:
    assert registry.create({"type": name, **options})(completions, **more) == rewards


def test_repetition_costs_the_more_the_more_there_is() -> None:
    said = "We walk along the river and look at boats. Then everybody goes home for supper."
    plain, echoed, stuck = (
        registry.create("repetition_penalty")([text])[0] for text in (said, f"{said} {said}", f"{said} {'very ' * 30}")
    )
    assert plain == 0
    assert echoed == pytest.approx(-0.8)
    assert -1 <= stuck < -0.1


def test_completions_are_texts_or_messages() -> None:
    message = {"role": "assistant", "content": THOUGHT}
    same = [THOUGHT, message, {"message": message}, [{"role": "user", "content": "?"}, message]]
    assert registry.create("format")(same) == [1, 1, 1, 1]
    assert RewardFunction.get_content({"role": "user", "content": "?"}) == ""


@pytest.mark.parametrize(("normalization", "rewards"), [("none", [2, 1]), ("sum", [0.5, 0.25]), ("minmax", [1, 0])])
def test_a_combined_reward_is_the_sum_of_others(normalization: str, rewards: list[float]) -> None:
    several = ["format", {"type": "format", "weight": 3.0, "params": {"preferred_tags": ["answer"]}}]
    combined = CombinedReward(several, normalization=normalization)
    assert combined([f"{THOUGHT}<answer>4</answer>", THOUGHT]) == rewards
    assert combined.name == "combined(formatreward,formatreward)"


class Picky(RewardFunction):
    """Raises over what is no number; otherwise the number, if it is the solution."""

    def compute(self, completions: list[Any], solution: Any = None, **kwargs: Any) -> list[float]:
        right = solution if isinstance(solution, list) else [solution] * len(completions)
        return [float(said) * (float(said) == gold) for said, gold in zip(completions, right, strict=True)]


class Log:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def log(self, metrics: dict[str, float]) -> None:
        self.rows.append(metrics)


def test_a_completion_at_which_a_reward_raises_has_none_and_the_others_have_theirs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    picky, logged = Picky(weight=2), Log()
    picky.set_wandb_logger(logged)
    first = picky(["4", "four", "5"], solution=[4, 4, 5])
    assert first == [8, pytest.approx(math.nan, nan_ok=True), 10]
    assert picky.failed == 1
    assert "the reward picky failed at completion 2 of 3" in caplog.text
    assert "could not convert string to float: 'four'" in caplog.text
    assert picky(["4"], solution=4) == [8]
    assert [math.isnan(reward) for reward in picky(["x", "y"], solution=4)] == [True, True]
    assert picky.failed == 3
    assert [metrics.get("reward/picky/failed") for metrics in logged.rows] == [1, 1, 3]
    assert [metrics.get("reward/picky/mean_raw") for metrics in logged.rows] == [4.5, 4, None]


@pytest.mark.parametrize(("normalization", "rewards"), [("none", [5, 6]), ("sum", [2.5, 3]), ("minmax", [0, 1])])
def test_a_sum_of_which_a_part_is_missing_is_none(normalization: str, rewards: list[float]) -> None:
    combined = CombinedReward([], normalization=normalization)
    combined.reward_functions = [Picky(), LegacyFunctionWrapper(lambda completions, **kwargs: 1.0)]
    found = combined(["4", "four", "5"], solution=[4, 4, 5])
    assert math.isnan(found[1])
    assert [found[0], found[2]] == rewards
    assert [reward.failed for reward in combined.reward_functions] == [1, 0]


def test_a_logger_that_raises_costs_no_reward() -> None:
    picky = Picky()
    picky.set_wandb_logger(object())
    assert picky(["4"], solution=4) == [4]


def test_a_reward_of_ones_own_is_registered() -> None:
    registry = RewardRegistry()
    registry.register(Picky, name="picky")
    registry.register_function("same", lambda completions, **kwargs: 2.0)
    assert registry.create("picky")(["4"], solution=4) == [4]
    assert registry.create("same", weight=0.5)(["a", "b"]) == [1, 1]
    with pytest.raises(ImportError, match="no reward is called 'repetition'; did you mean repetition_penalty"):
        registry.create("repetition")
