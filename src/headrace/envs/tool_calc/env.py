"""`tool_calc`: arithmetic that is hard to do in one's head, and a calculator to call."""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from typing import Any

from pydantic import Field

from headrace.data.errors import InvalidInput
from headrace.envs.conversation import (
    ChatEndpoint,
    ConversationConfig,
    ConversationEnv,
    Messages,
)
from headrace.envs.tool_calc.arithmetic import calculate, written
from headrace.envs.types import Item

NUMBER = re.compile(r"-?(?<!\d)\d{1,300}(?:\.\d{1,300})?(?!\d)", re.ASCII)
NAME, ARGUMENT = "calculator", "expression"
CALCULATOR = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "The value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {ARGUMENT: {"type": "string", "description": "such as (17 + 4) * 3"}},
            "required": [ARGUMENT],
        },
    },
}


class ToolCalcConfig(ConversationConfig):
    """How large the problems are, and how many calls of the calculator a conversation has."""

    terms: int = Field(3, ge=2, le=20, description="numbers of a problem")
    largest: int = Field(9999, ge=1, le=10**6, description="largest number in a problem")
    calls: int = Field(3, ge=1, description="answers that may call the calculator")
    answer_tokens: int = Field(256, ge=1, description="most tokens of one answer")


class ToolCalcEnv(ConversationEnv):
    """The last number of the final answer counts: one point where it is right."""

    name = "tool_calc"
    env_config_cls = ToolCalcConfig
    config: ToolCalcConfig

    async def setup(self) -> None:
        self.random = random.Random(f"train/{self.config.seed}")

    async def get_next_item(self) -> Item:
        return self.problem(self.random)

    def held_out(self) -> list[Item]:
        chance = random.Random(f"eval/{self.config.seed}")
        return [self.problem(chance) for _ in range(self.config.eval_items)]

    def problem(self, chance: random.Random) -> Item:
        """An item: a random expression, and its value."""
        expression = str(chance.randint(1, self.config.largest))
        for _ in range(self.config.terms - 1):
            expression = f"({expression})" if chance.random() < 0.3 and " " in expression else expression
            expression += f" {chance.choice('+-*')} {chance.randint(1, self.config.largest)}"
        asked = f"What is {expression}? Use the {NAME}, then answer with the number alone."
        return {"question": asked, "answer": written(calculate(expression))}

    async def play(self, server: ChatEndpoint, item: Item, **sampling: Any) -> tuple[Messages, float]:
        messages: Messages = [{"role": "user", "content": item["question"]}]
        for _ in range(self.config.calls + 1):
            answer = await self.said(server, messages, tools=[CALCULATOR], **sampling)
            said: dict[str, Any] = {"role": "assistant", "content": answer.content or ""}
            messages.append(said)
            if not answer.tool_calls:
                return messages, score_of(said["content"], item["answer"])
            said["tool_calls"] = [call.model_dump() for call in answer.tool_calls]
            for call in answer.tool_calls:
                result = called(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return messages, 0.0


def called(name: str, arguments: str) -> str:
    """What the model hears of a call: a number, or what was wrong with it."""
    if name != NAME:
        return f"error: there is no tool {name!r}, only {NAME}"
    try:
        given = json.loads(arguments)
        if not isinstance(given, dict) or not isinstance(given.get(ARGUMENT), str):
            return f'error: call it with {{"{ARGUMENT}": "1 + 2"}}'
        return written(calculate(given[ARGUMENT]))
    except (InvalidInput, ValueError, RecursionError) as error:
        return f"error: {error}"


def score_of(said: str, right: str) -> float:
    """1 where the last number of an answer is the right one, else 0."""
    found = NUMBER.findall(re.sub(r"(?<=\d),(?=\d)", "", said))
    return float(bool(found) and Fraction(found[-1]) == Fraction(right))
