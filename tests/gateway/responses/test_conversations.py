"""The `openai` SDK's Responses with only its base_url changed: ten answers with tools, held to every token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from tests.gateway.kit import Evidence, Running, told, tree
from tests.gateway.play import ANSWERS, QUESTIONS, SYSTEM, TOLD, Stage, staged
from tests.gateway.responses.kit import ADD, Json, checked, respond, result, settled, user
from tests.gateway.tool_model import ADD as TAUGHT
from tests.gateway.tool_model import BOTH, EIGHT, FIVE, MORE, ONE, TWO
from tests.matrix import paired

Call = Callable[[str, Json], Awaitable[Response]]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged() as found:
        yield found


async def sync(base: str, asked: Json) -> Response:
    with openai.OpenAI(**settled(base)) as client:
        found: Response = client.responses.create(model="any", **asked)
        return found


async def awaited(base: str, asked: Json) -> Response:
    async with openai.AsyncOpenAI(**settled(base + "/v1")) as client:
        found: Response = await client.responses.create(model="any", **asked)
        return found


async def streamed(base: str, asked: Json) -> Response:
    with openai.OpenAI(**settled(base + "/v1")) as client:
        events = list(client.responses.create(model="any", stream=True, **asked))
    checked([event.to_dict() for event in events])
    found: Response = events[-1].response
    return found


async def streamed_awaiting(base: str, asked: Json) -> Response:
    async with openai.AsyncOpenAI(**settled(base)) as client:
        events = [event async for event in await client.responses.create(model="any", stream=True, **asked)]
    checked([event.to_dict() for event in events])
    found: Response = events[-1].response
    return found


class Whole:
    """Keeps every item and sends them all, as the objects that the SDK gave."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def given(self, new: list[Json]) -> Json:
        self.items += new
        return {"input": self.items}

    def answered(self, response: Response) -> None:
        self.items += response.output


class Dumped(Whole):
    """Keeps what is set of every item."""

    def answered(self, response: Response) -> None:
        self.items += [item.model_dump(exclude_none=True) for item in response.output]


class Sealed(Whole):
    """Nothing is stored: reasoning is sent back as nothing but its encrypted content, items without their ids."""

    def given(self, new: list[Json]) -> Json:
        return {**super().given(new), "store": False, "include": ["reasoning.encrypted_content"]}

    def answered(self, response: Response) -> None:
        for item in response.output:
            kept = item.model_dump(exclude_none=True, exclude={"id", "status"})
            if item.type == "reasoning":
                del kept["content"]
            self.items.append(kept)


class Named:
    """Keeps nothing but the last response's id."""

    def __init__(self) -> None:
        self.last: str | None = None

    def given(self, new: list[Json]) -> Json:
        return {"input": new, "previous_response_id": self.last}

    def answered(self, response: Response) -> None:
        assert response.previous_response_id == self.last
        self.last = response.id


async def converse(call: Call, base: str, memory: Any, questions: list[str], **asked: Any) -> list[str]:
    """What the agent is told at last to each question."""
    said = []
    for question in questions:
        new = [user(question)]
        while new:
            response = await call(base, {**memory.given(new), **asked})
            memory.answered(response)
            new = [result(item.to_dict()) for item in response.output if item.type == "function_call"]
        said.append(response.output_text)
    return said


@pytest.mark.parametrize(
    ("call", "memory"), paired([sync, awaited, streamed, streamed_awaiting], [Whole, Dumped, Sealed, Named])
)
async def test_ten_answers_with_tools_are_one_line_of_exact_tokens(stage: Stage, call: Call, memory: Any) -> None:
    base = stage.begin()
    assert await converse(call, base, memory(), QUESTIONS, instructions=SYSTEM, tools=[ADD]) == TOLD
    stage.holds(base)


@pytest.mark.parametrize("memory", [Whole, Named])
@pytest.mark.parametrize("call", [sync, streamed], ids=lambda call: call.__name__)
async def test_what_a_real_engine_did_is_what_is_recorded(
    agency: Running, witness: Evidence, call: Call, memory: Any
) -> None:
    tool = {"type": "function", **TAUGHT["function"]}
    asked: Json = {"tools": [tool], "temperature": 0}
    bases = [agency.init()["base_url"] for _ in range(2)]
    assert await converse(call, bases[0], memory(), [ONE, MORE], **asked) == [FIVE, EIGHT]
    assert await converse(call, bases[1], memory(), [TWO], **asked) == [BOTH]
    one, two = (agency.steps(base.split("/")[3]) for base in bases)
    witness.holds([*one, *two])
    assert tree(one) == [None, 0, 1, 2]
    assert tree(two) == [None, 0]


@pytest.mark.parametrize("sealed", [False, True])
def test_reasoning_that_is_rendered_anew_is_what_was_thought(stage: Stage, sealed: bool) -> None:
    """Other tools begin a branch, whose prompt holds the reasoning as the agent sent it back."""
    base = stage.begin()
    asked: Json = {"store": False, "include": ["reasoning.encrypted_content"]} if sealed else {}
    first = told(respond(stage.gateway, base, QUESTIONS[0], tools=[ADD], **asked))
    thought, call = first["output"]
    assert first["usage"]["output_tokens_details"]["reasoning_tokens"] > 5
    if sealed:
        del thought["content"]
    items = [user(QUESTIONS[0]), thought, call, result(call)]
    told(respond(stage.gateway, base, items, tools=[ADD, {**ADD, "name": "other"}]))
    prompt = stage.rollout.vocabulary.decode(stage.rollout.orders[1]["prompt"])
    assert f"<think>\n{ANSWERS[0].reasoning}\n</think>" in prompt
    assert tree(stage.gateway.steps(base.split("/")[3])) == [None, None]


def test_an_effort_of_none_switches_reasoning_off_where_the_template_can(stage: Stage) -> None:
    base = stage.begin()
    for effort in ("low", "none"):
        told(respond(stage.gateway, base, QUESTIONS[0], reasoning={"effort": effort}))
    prompts = [stage.rollout.vocabulary.decode(order["prompt"]) for order in stage.rollout.orders]
    assert ["<think>\n\n</think>" in prompt for prompt in prompts] == [False, True]


def test_the_helper_for_streams_puts_items_together(stage: Stage) -> None:
    base = stage.begin()
    with openai.OpenAI(**settled(base)) as client:
        strict = {**ADD, "strict": True, "parameters": {**ADD["parameters"], "additionalProperties": False}}
        with client.responses.stream(model="any", input=QUESTIONS[0], tools=[strict]) as events:
            kinds = [event.type for event in events]
            final = events.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    reasoning, call = final.output
    assert reasoning.content[0].text == "One after the other.\nFirst 1 + 2."
    assert call.parsed_arguments == {"a": 1, "b": 2}
