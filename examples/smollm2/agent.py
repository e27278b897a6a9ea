"""The agent: the OpenAI Agents SDK with a calculator. All that it knows of training is a base URL.

SmolLM2-135M was never shown a tool, so the conversation begins with four examples. With them some of its answers are
calls that can be read, and training does the rest.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable

import httpx
from agents import (
    Agent,
    AgentsException,
    ModelSettings,
    OpenAIProvider,
    RunConfig,
    Runner,
    TResponseInputItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

set_tracing_disabled(True)  # or it sends its traces to OpenAI

INSTRUCTIONS = "Answer with a number. Use the calculator for all arithmetic."
#: Questions, what the calculator is asked, and what it answers.
EXAMPLES = [
    ("What is 21 + 34?", "21 + 34", "55"),
    ("A bag holds 7 nuts. How many nuts are in 12 bags?", "7 * 12", "84"),
    ("Tom had 95 cards and lost 18 of them. How many cards has he left?", "95 - 18", "77"),
    ("What is 14 times 23?", "14 * 23", "322"),
]
#: Calls of the model in one conversation: two suffice, a third lets it mend a call that went wrong.
MAX_TURNS = 3
#: Tokens of one answer: a call has about 40.
MAX_TOKENS = 56
#: Of sampling, in training and on held-out problems alike. At 1 a model of this size seldom writes a whole call.
TEMPERATURE = 0.6
#: Digits of the largest number that is worked with.
MAX_DIGITS = 12
OPERATORS: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.USub: operator.neg,
}


async def solve(task: dict[str, str], base_url: str, api_key: str) -> None:
    """Plays one rollout. A model that names an unknown tool or does not come to an end has played badly, which is for
    the reward to say: such a conversation ends there, and is no failure."""
    # The gateway is plain HTTP; certificates, which take longer to load than an answer, are not looked for.
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=httpx.AsyncClient(verify=False)) as client:
        provider = OpenAIProvider(openai_client=client, use_responses=False)
        conversation = [*examples(), {"role": "user", "content": task["question"]}]
        try:
            await Runner.run(AGENT, conversation, max_turns=MAX_TURNS, run_config=RunConfig(model_provider=provider))
        except AgentsException:
            pass


@function_tool
def calculate(expression: str) -> str:
    """Works out an expression such as 12 + 7 * 3."""
    return calculated(expression)


def calculated(expression: str) -> str:
    """The value of an expression of whole numbers with + - * and brackets; else a word on what is wrong with it."""
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not an expression of whole numbers with + - *"
    return str(value) if abs(value) < 10**MAX_DIGITS else "error: too large"


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and value < 10**MAX_DIGITS:
            return value
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
    raise ValueError(ast.dump(node))


def examples() -> list[TResponseInputItem]:
    """The examples as a conversation."""
    found: list[TResponseInputItem] = []
    for number, (question, expression, result) in enumerate(EXAMPLES):
        call_id, arguments = f"example{number}", json.dumps({"expression": expression})
        found += [
            {"role": "user", "content": question},
            {"type": "function_call", "call_id": call_id, "name": "calculate", "arguments": arguments},
            {"type": "function_call_output", "call_id": call_id, "output": result},
            {"role": "assistant", "content": result},
        ]
    return found


AGENT = Agent(
    name="calculating",
    instructions=INSTRUCTIONS,
    tools=[calculate],
    model="policy",
    model_settings=ModelSettings(temperature=TEMPERATURE, max_tokens=MAX_TOKENS),
)
