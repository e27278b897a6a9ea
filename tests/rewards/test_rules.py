"""What each rule gives, by values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.data.errors import InvalidInput
from headrace.rewards import Reward, RewardConfig, RewardFailure, Sample, Score
from headrace.rewards.rule import RULES
from headrace.rewards.rules import made
from headrace.rewards.sample import score_of


def value(use: str, text: str, truth: Any = None, ids: int = 0, **options: Any) -> float:
    sample = Sample(text=text, ground_truth=truth, response_ids=list(range(ids)))
    return score_of(made(use, options).score(sample)).value


@pytest.mark.parametrize(
    ("text", "truth", "options", "wanted"),
    [
        (" Paris \n", "Paris", {}, 1.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("<think>Rome?</think>Paris", "Paris", {}, 1.0),
        ("so #### 12", 12, {"after": "####"}, 1.0),
        ("so 12", 12, {"after": "####"}, 0.0),
        ("b", ["a", "b"], {}, 1.0),
        ("", "", {}, 1.0),
    ],
)
def test_exact_match(text: str, truth: Any, options: dict[str, Any], wanted: float) -> None:
    assert value("exact_match", text, truth, **options) == wanted


@pytest.mark.parametrize(
    ("text", "truth", "wanted"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"first \boxed{3}, no: \boxed{4}", "4", 1.0),
        ("The answer is 42.", "42", 1.0),
        ("The answer is 41.", "42", 0.0),
        (r"$x^2 + 2x + 1$", "(x+1)^2", 1.0),
        ("It is 72", "48 + 24 = 72\n#### 72", 1.0),
        ("no idea", "42", 0.0),
        (r"<think>\boxed{42}</think>\boxed{41}", 42, 0.0),
    ],
)
def test_math_verify(text: str, truth: Any, wanted: float) -> None:
    assert value("math_verify", text, truth) == wanted


def test_a_ground_truth_that_is_no_mathematics_is_a_failure_and_no_wrong_answer() -> None:
    with pytest.raises(RewardFailure, match="no mathematics"):
        value("math_verify", "4", "")


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        ("a\nb", {"pattern": "a.b"}, 1.0),
        ("xay", {"pattern": "a", "whole": True}, 0.0),
        ("A", {"pattern": "a"}, 0.0),
        ("A", {"pattern": "a", "ignore_case": True}, 1.0),
        ("as an AI", {"pattern": "as an AI", "absent": True}, 0.0),
        ("hello", {"pattern": "as an AI", "absent": True}, 1.0),
    ],
)
def test_regex(text: str, options: dict[str, Any], wanted: float) -> None:
    assert value("regex", text, **options) == wanted


GOOD = "<think>a</think>\n<answer>b</answer>"


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        (GOOD, {}, 1.0),
        ("so: " + GOOD, {}, 1.0),
        ("so: " + GOOD, {"nothing_else": True}, 0.0),
        (GOOD, {"nothing_else": True}, 1.0),
        ("<answer>b</answer><think>a</think>", {}, 0.0),
        ("<think></think><answer>b</answer>", {}, 0.0),
        (GOOD + "<answer>c</answer>", {}, 0.0),
        ("<answer>b</answer>", {"partial": True}, 0.5),
        ("<answer>b</answer>", {"tags": ["answer"]}, 1.0),
        ("</answer>b<answer>", {"tags": ["answer"]}, 0.0),
    ],
)
def test_format(text: str, options: dict[str, Any], wanted: float) -> None:
    assert value("format", text, **options) == wanted


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        ('{"n": 1}', {"schema": SCHEMA}, 1.0),
        ('{"n": "1"}', {"schema": SCHEMA}, 0.0),
        ('Here:\n```json\n{"n": 1}\n```\n', {"schema": SCHEMA}, 1.0),
        ("[1, 2]", {}, 1.0),
        ("[1, 2", {}, 0.0),
        ("[" * 100_000, {}, 0.0),
    ],
)
def test_json_schema(text: str, options: dict[str, Any], wanted: float) -> None:
    assert value("json_schema", text, **options) == wanted


@pytest.mark.parametrize(
    ("text", "truth", "options", "wanted"),
    [
        ("it is 10", 10, {}, 1.0),
        ("it is 10.25", "10", {}, 0.75),
        ("it is 12", 10, {}, 0.0),
        ("it is 1,234.5", 1234.5, {}, 1.0),
        ("-3", -3, {}, 1.0),
        ("from 5-3", 3, {}, 1.0),
        ("1.5e3", 1500, {}, 1.0),
        ("9, or rather 11", 10, {"within": 0.2, "relative": True}, 0.5),
        ("1", 0, {"within": 0.2, "relative": True}, 0.0),
        ("no number, the5th one", 10, {"within": 10}, 0.5),
        ("none", 10, {}, 0.0),
        ("1e999", 10, {}, 0.0),
    ],
)
def test_number_closeness(text: str, truth: Any, options: dict[str, Any], wanted: float) -> None:
    assert value("number_closeness", text, truth, **options) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("text", "ids", "options", "wanted"),
    [
        ("abcd", 0, {"unit": "characters", "most": 4}, 1.0),
        ("abcde", 0, {"unit": "characters", "most": 4}, 0.0),
        ("abcde", 0, {"unit": "characters", "most": 4, "margin": 4}, 0.75),
        ("a b c", 0, {"unit": "words", "least": 5, "most": 9, "margin": 4}, 0.5),
        ("any", 12, {"most": 10, "margin": 1}, 0.0),
        ("any", 10, {"most": 10}, 1.0),
    ],
)
def test_length(text: str, ids: int, options: dict[str, Any], wanted: float) -> None:
    assert value("length", text, ids=ids, **options) == wanted


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        ("one two three four five", {}, 0.0),
        ("short", {}, 0.0),
        ("a b a b a b", {"words": 2}, -0.6),  # ab ba ab ba ab: three of five were there before
        ("no no no no no", {"words": 1}, -0.8),
        ("no no no no no", {"words": 1, "free": 0.6}, -0.5),
    ],
)
def test_repetition(text: str, options: dict[str, Any], wanted: float) -> None:
    assert value("repetition", text, **options) == pytest.approx(wanted)


def test_a_reward_function_that_ships_is_a_rule_by_its_name() -> None:
    assert value("accuracy", r"\boxed{4}", "4") == 1.0
    assert value("reasoning_steps", "nothing of the kind") == 0.0
    with pytest.raises(RewardFailure, match="no ground truth"):
        value("accuracy", r"\boxed{4}")


@pytest.mark.parametrize(
    ("use", "text", "truth", "wanted"),
    [
        ("r1", "it is 42", 42, 1.0),
        ("r1", "it is 41", 42, 0.0),
        ("r1", "Rome", ["Paris", "Rome"], 1.0),
        ("r1", "Bonn", ["Paris", "Rome"], 0.0),
        ("r1", "Rome", {"role": "assistant", "content": "Rome"}, 1.0),
        ("accuracy", r"\boxed{5}", [4, "5"], 1.0),
        ("accuracy", r"\boxed{6}", [4, "5"], 0.0),
        ("cascading_r1_math", r"<think>a</think> \boxed{5}", ["4", "5"], 1.5),
    ],
)
def test_a_reward_functions_ground_truth_is_text_a_number_or_alternatives(
    use: str, text: str, truth: Any, wanted: float
) -> None:
    assert value(use, text, truth) == wanted


@pytest.mark.parametrize("truth", ["", [], ["4", None], {"text": "4"}, [["4"]]])
def test_a_ground_truth_in_which_nothing_can_be_looked_for_is_a_failure(truth: Any) -> None:
    with pytest.raises(RewardFailure, match="the ground truth"):
        value("r1", "4", truth)


@pytest.mark.parametrize(
    ("use", "options"),
    [
        ("cascading_r1_math", {}),
        ("combined", {"rewards": ["format", "r1"]}),
        ("combined", {"rewards": [{"type": "combined", "rewards": ["cascading_r1_math"]}]}),
    ],
)
def test_a_reward_function_inside_another_needs_its_ground_truth_too(use: str, options: dict[str, Any]) -> None:
    with pytest.raises(RewardFailure, match="no ground truth"):
        value(use, r"\boxed{4}", **options)
    assert value(use, r"\boxed{4}", "4", **options) == 1.0


def test_a_sum_of_which_no_part_needs_a_ground_truth_does_without() -> None:
    assert value("combined", GOOD, rewards=["format", {"type": "format", "preferred_tags": ["answer"]}]) == 2.0


@pytest.mark.parametrize("use", ["exact_match", "math_verify", "number_closeness", "unit_tests"])
async def test_a_rule_that_needs_a_ground_truth_fails_without_one_and_is_not_tried_again(use: str) -> None:
    async with Reward(RewardConfig(rules=[{"use": use}])) as reward:
        (outcome,) = await reward.score([Sample(text="4")])
    assert isinstance(outcome, RewardFailure)
    assert (outcome.source, outcome.reason) == (use, "error")
    assert "no ground truth" in outcome.detail
    assert reward.counters.retried == 0


async def test_a_pattern_that_never_ends_is_ended_and_costs_no_other_sample() -> None:
    config = RewardConfig(rules=[{"use": "regex", "pattern": "(a+)+$"}], timeout_s=6, retries=0)
    async with Reward(config) as reward:
        endless, quick = await reward.score([Sample(text="a" * 64 + "b"), Sample(text="aaa")])
    assert isinstance(endless, RewardFailure)
    assert endless.reason == "timeout"
    assert quick == Score(1.0, {"regex": 1.0})


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"use": "exact_mach"}, "no rule is called 'exact_mach'; did you mean exact_match?"),
        (
            {"use": "regex", "pattern": "a", "ignore_cases": True},
            "ignore_cases is not known; did you mean ignore_case?",
        ),
        ({"use": "regex", "pattern": "("}, "it is no regular expression"),
        ({"use": "json_schema", "schema": {"type": 3}}, "it is no JSON schema"),
        ({"use": "length", "least": 5, "most": 3}, "least, 5, is more than most, 3"),
        ({"use": "unit_tests", "limits": {"cpu": 1}}, "limits.cpu is not known; did you mean cpu_s?"),
        ({"use": "format", "weight": "much"}, "weight"),
        (
            {"use": "accuracy", "tolerence": 0.01},
            "the rule accuracy: tolerence is not known; did you mean tolerance?",
        ),
        ({"use": "cascading_r1_math", "boxes": 3}, "boxes is not known; it takes name, weight"),
        (
            {"use": "combined", "rewards": ["format", {"type": "r1", "params": {"format_wait": 2}}]},
            "the rule combined: rewards.1: format_wait is not known; did you mean format_weight?",
        ),
        ({"use": "combined", "rewards": ["acuracy"]}, "no reward is called 'acuracy'; did you mean accuracy?"),
        ({"use": "combined", "rewards": [{"weight": 2}]}, "rewards.0: {'weight': 2} has no `type`"),
    ],
)
def test_a_wrong_rule_or_option_is_named(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as told:
        RewardConfig.of({"rules": [rule]}, source="run.yaml")
    assert words in str(told.value)


def test_options_that_a_reward_function_or_a_part_of_it_takes_are_taken() -> None:
    assert value("accuracy", r"\boxed{4}", "4", tolerance=0.1, split_on_think_tag=False) == 1.0
    assert value("r1", "<think>a</think> 4", "4", format_weight=0.25) == 1.25
    parts = [{"type": "r1", "weight": 2.0, "params": {"format_weight": 0.0}}]
    assert value("combined", "<think>a</think> 4", "4", rewards=parts, normalization="sum") == 0.5


def test_the_registry_has_them_all() -> None:
    of_text = {"exact_match", "math_verify", "regex", "format", "json_schema", "number_closeness"}
    assert set(RULES) == of_text | {"length", "repetition", "unit_tests"}
