"""LangChain's `ChatOpenAI` as it is, with only its base_url changed; what is recorded is what the engine did."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    ToolMessage,
    messages_from_dict,
    messages_to_dict,
)
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from tests.gateway.kit import Evidence, Running, tree
from tests.gateway.tool_model import BOTH, EIGHT, FIVE, HELLO, HI, MORE, ONE, TWO

PREFIXES = ["", "/v1"]
Call = Callable[[Any, list[BaseMessage]], Awaitable[AIMessage]]


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def model(base_url: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model="any", base_url=base_url, api_key=SecretStr("none"), temperature=0, max_retries=0, **more)


async def invoked(llm: Any, messages: list[BaseMessage]) -> AIMessage:
    found: AIMessage = llm.invoke(messages)
    return found


async def awaited(llm: Any, messages: list[BaseMessage]) -> AIMessage:
    found: AIMessage = await llm.ainvoke(messages)
    return found


async def streamed(llm: Any, messages: list[BaseMessage]) -> AIMessage:
    return added_up(list(llm.stream(messages)))


async def streamed_awaiting(llm: Any, messages: list[BaseMessage]) -> AIMessage:
    return added_up([chunk async for chunk in llm.astream(messages)])


def added_up(chunks: list[AIMessageChunk]) -> AIMessage:
    """The message that chunks amount to, as LangChain adds them."""
    found, *others = chunks
    assert others
    for chunk in others:
        found = found + chunk
    return found


class Agent:
    """Answers questions with the tool, until the model calls none."""

    def __init__(self, llm: ChatOpenAI, call: Call = invoked) -> None:
        self.llm = llm.bind_tools([add])
        self.call = call
        self.messages: list[BaseMessage] = []

    async def ask(self, question: str) -> Any:
        self.messages.append(HumanMessage(question))
        while True:
            answer = await self.call(self.llm, self.messages)
            self.messages.append(answer)
            if not answer.tool_calls:
                return answer.content
            for call in answer.tool_calls:
                self.messages.append(ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"]))


@pytest.mark.parametrize("call", [invoked, streamed, awaited, streamed_awaiting])
@pytest.mark.parametrize("prefix", PREFIXES)
async def test_a_conversation_with_tools(agency: Running, witness: Evidence, prefix: str, call: Call) -> None:
    begun = agency.init()
    agent = Agent(model(begun["base_url"] + prefix), call)
    assert [await agent.ask(ONE), await agent.ask(MORE)] == [FIVE, EIGHT]
    steps = agency.steps(begun["trajectory_uid"])
    witness.holds(steps)
    assert tree(steps) == [None, 0, 1, 2]


@pytest.mark.parametrize("call", [invoked, streamed])
async def test_an_answer_with_two_calls_takes_two_results(agency: Running, witness: Evidence, call: Call) -> None:
    begun = agency.init()
    agent = Agent(model(begun["base_url"]), call)
    assert await agent.ask(TWO) == BOTH
    answer = agent.messages[1]
    assert isinstance(answer, AIMessage)
    assert [made["args"] for made in answer.tool_calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    steps = agency.steps(begun["trajectory_uid"])
    witness.holds(steps)
    assert tree(steps) == [None, 0]


async def test_a_history_that_was_stored_and_loaded_is_continued(agency: Running, witness: Evidence) -> None:
    begun = agency.init()
    agent = Agent(model(begun["base_url"]))
    await agent.ask(ONE)
    agent.messages = messages_from_dict(messages_to_dict(agent.messages))
    assert await agent.ask(MORE) == EIGHT
    steps = agency.steps(begun["trajectory_uid"])
    witness.holds(steps)
    assert tree(steps) == [None, 0, 1, 2]


async def test_two_agents_in_one_trajectory_are_two_branches(agency: Running, witness: Evidence) -> None:
    begun = agency.init()
    llm = model(begun["base_url"])
    main, sub = Agent(llm), Agent(llm)
    assert [await main.ask(ONE), await sub.ask(HELLO)] == [FIVE, HI]
    assert [await main.ask(MORE), await sub.ask(ONE)] == [EIGHT, FIVE]
    steps = agency.steps(begun["trajectory_uid"])
    witness.holds(steps)
    assert tree(steps) == [None, 0, None, 1, 3, 2, 5]


def test_the_usage_is_that_of_the_tokens(agency: Running) -> None:
    begun = agency.init()
    answer = model(begun["base_url"]).invoke(HELLO)
    (step,) = agency.steps(begun["trajectory_uid"])
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == len(step.prompt_ids)
    assert answer.usage_metadata["output_tokens"] == len(step.response_ids)


def test_an_unknown_trajectory_is_said_so(agency: Running) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        model(f"{agency.address}/nobody/nothing").invoke(HELLO)
