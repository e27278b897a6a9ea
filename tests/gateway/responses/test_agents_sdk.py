"""The OpenAI Agents SDK with only its base_url changed, streaming and not, with each way it keeps a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from agents import Agent, OpenAIProvider, RunConfig, Runner, RunResult, RunResultStreaming, function_tool
from tests.gateway.play import QUESTIONS, SYSTEM, TOLD, Stage, staged
from tests.gateway.responses.kit import settled
from tests.matrix import paired


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged() as found:
        yield found


@function_tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)


async def run(agent: Agent[Any], given: Any, **options: Any) -> RunResult:
    return await Runner.run(agent, given, **options)


async def run_streamed(agent: Agent[Any], given: Any, **options: Any) -> RunResultStreaming:
    found = Runner.run_streamed(agent, given, **options)
    async for _ in found.stream_events():
        pass
    return found


@pytest.mark.parametrize(("runner", "named"), paired([run, run_streamed], [False, True]))
async def test_ten_answers_with_tools_are_one_line_of_exact_tokens(stage: Stage, runner: Any, named: bool) -> None:
    base = stage.begin()
    client = openai.AsyncOpenAI(**settled(f"{base}/v1"))  # the SDK's own would outlive this test's event loop
    config = RunConfig(model_provider=OpenAIProvider(openai_client=client), tracing_disabled=True)
    agent: Agent[Any] = Agent(name="adder", instructions=SYSTEM, tools=[add], model="any")
    said: list[str] = []
    given: Any = []
    options: dict[str, Any] = {"auto_previous_response_id": True} if named else {}
    for question in QUESTIONS:
        given = question if named else [*given, {"role": "user", "content": question}]
        done = await runner(agent, given, run_config=config, **options)
        said.append(done.final_output)
        if named:
            options["previous_response_id"] = done.last_response_id
        else:
            given = done.to_input_list()
    await client.close()
    assert said == TOLD
    stage.holds(base)
