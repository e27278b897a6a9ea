"""Rewards of completions, by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.rewards import CombinedReward, RewardFunction, registry
from headrace.rewards.registry import RewardRegistry

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


def test_a_reward_of_ones_own_is_registered_and_one_that_raises_pays_nothing() -> None:
    registry = RewardRegistry()

    @registry.register
    class BrokenReward(RewardFunction):
        def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
            raise ValueError("broken")

    registry.register_function("same", lambda completions, **kwargs: 2.0)
    assert registry.create("broken")(["a", "b"]) == [0, 0]
    assert registry.create("same", weight=0.5)(["a", "b"]) == [1, 1]
    with pytest.raises(ImportError, match="no reward is called 'repetition'; did you mean repetition_penalty"):
        registry.create("repetition")
