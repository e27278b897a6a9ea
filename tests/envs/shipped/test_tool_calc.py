"""`tool_calc`: what the calculator computes and refuses, how calls are played, and that it is an environment."""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from headrace.data.errors import InvalidInput
from headrace.engine import tiny
from headrace.envs import APIServerConfig
from headrace.envs.server import ChatCompletion
from headrace.envs.testing import EnvConformance
from headrace.envs.tool_calc import ToolCalcConfig, ToolCalcEnv
from headrace.envs.tool_calc.arithmetic import calculate, written
from headrace.envs.tool_calc.env import called, score_of


class TestConformance(EnvConformance):
    env_cls = ToolCalcEnv

    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(tiny.folder())

    def say(self, asked: str, chance: random.Random) -> str:
        call = {"name": "calculator", "arguments": {"expression": f"{chance.randint(1, 9)} * 7"}}
        return chance.choice([f"<tool_call>\n{json.dumps(call)}\n</tool_call>", f"It is {chance.randint(1, 99)}."])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("7 / 2", Fraction(7, 2)),
        ("-7 // 2", -4),
        ("-7 % 3", 2),
        ("2 ** -2", Fraction(1, 4)),
    ],
)
def test_the_calculator_computes_exactly(expression: str, value: Fraction) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "because"),
    [
        ("9 ** 9 ** 9", "too large"),
        ("(9 ** 300) * (9 ** 300)", "too large"),
        ("2 ** 0.5", "whole"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("__import__('os')", "digits"),
        ("1e999", "digits"),
        ("1 +", "no arithmetic expression"),
        ("", "no arithmetic expression"),
        ("(" * 200, "no arithmetic expression"),
        ("1" * 201, "at most 200"),
        ("()", "Tuple"),
        ("1 (2)", "Call"),
    ],
)
def test_the_calculator_says_what_it_does_not_compute(expression: str, because: str) -> None:
    with pytest.raises(InvalidInput, match=because):
        calculate(expression)


@given(st.text("0123456789+-*/%(). ", max_size=60))
def test_whatever_is_written_is_a_number_or_refused(expression: str) -> None:
    try:
        value = calculate(expression)
    except InvalidInput:
        return
    assert Fraction(written(value)) == pytest.approx(value)


@pytest.mark.parametrize("arguments", ["", "[]", "{}", '{"expression": 7}', "[" * 100_000])
def test_a_call_that_is_none_is_answered_with_what_is_wrong(arguments: str) -> None:
    assert called("calculator", arguments).startswith("error: ")
    assert called("calc", "{}") == "error: there is no tool 'calc', only calculator"


@pytest.mark.parametrize(
    ("said", "score"), [("1,817,517", 1.0), ("It is 1817517.", 1.0), ("1817517.0", 1.0), ("1817518", 0.0), ("", 0.0)]
)
def test_the_last_number_counts(said: str, score: float) -> None:
    assert score_of(said, "1817517") == score


class Caller:
    """Calls the calculator with the question's expression and repeats what it says, so many times."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    async def chat_completion(self, *, messages: list[dict[str, Any]], **asked: Any) -> ChatCompletion:
        if len(messages) // 2 < self.calls:
            (expression,) = re.findall(r"What is (.*)\?", messages[0]["content"])
            function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
            message = {"content": None, "tool_calls": [{"id": "call", "function": function}]}
        else:
            message = {"content": messages[-1]["content"]}
        return ChatCompletion.model_validate({"choices": [{"message": message}]})


@pytest.mark.parametrize(("calls", "score"), [(1, 1.0), (3, 1.0), (4, 0.0)])
async def test_who_calls_the_calculator_and_answers_in_time_is_right(calls: int, score: float) -> None:
    env = ToolCalcEnv(ToolCalcConfig(), [APIServerConfig(base_url="http://127.0.0.1:9/v1")])
    await env.setup()
    for _ in range(20):
        _, found = await env.play(Caller(calls), await env.get_next_item())
        assert found == score
