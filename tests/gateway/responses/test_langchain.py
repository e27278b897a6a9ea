"""LangChain's `ChatOpenAI` told to speak Responses, with only its base_url changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from tests.gateway.play import QUESTIONS, SYSTEM, TOLD, Stage, staged
from tests.matrix import usual


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged() as found:
        yield found


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@pytest.mark.parametrize("streamed", usual([True, False]))
def test_ten_answers_with_tools_are_one_line_of_exact_tokens(stage: Stage, streamed: bool) -> None:
    base = stage.begin()
    bare = ChatOpenAI(
        model="any", base_url=base, api_key=SecretStr("none"), max_retries=0, use_responses_api=True, streaming=streamed
    )
    model = bare.bind_tools([add])
    messages: list[BaseMessage] = [SystemMessage(SYSTEM)]
    said = []
    for question in QUESTIONS:
        messages.append(HumanMessage(question))
        while True:
            answer: Any = model.invoke(messages)
            messages.append(answer)
            if not answer.tool_calls:
                break
            messages += [add.invoke(call) for call in answer.tool_calls]
        said.append(answer.text)
    assert said == TOLD
    stage.holds(base)
