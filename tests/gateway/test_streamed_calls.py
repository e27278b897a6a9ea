"""Tool calls streamed as they are sampled, read by the SDKs as they are: what each puts together is the whole answer.

A call that breaks off is told as far as it went, and no SDK is told to carry it out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from agents import Agent, ModelBehaviorError, OpenAIProvider, RunConfig, Runner, function_tool
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from tests.gateway.kit import Json, Running, tree
from tests.gateway.rollout import Rollout, Say, in_front

from headrace.gateway.turn import tool_call_ids

PARAMETERS: Json = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "lines": {"type": "array"}},
    "required": ["path"],
}
WRITE: Json = {"name": "write", "description": "Writes a file.", "parameters": PARAMETERS}
QUESTION = "Write it down."

#: Arguments as a model writes them: spaces of its own, escapes, other scripts, other values than strings.
FIRST = '{"path": "größe.txt",  "text": "a \\"quoted\\" line\\nand 正確 🙂", "lines": [1, 2.5, {"deep": null}]}'
SECOND = '{"path":"b"}'


def written(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'


@dataclass(frozen=True)
class Told:
    """What an SDK says that an answer was: its text, its calls' names, ids and arguments, and how it ended. `pieces`:
    those in which arguments came; none of an answer that came whole."""

    call_id: str
    text: str
    names: list[str]
    ids: list[str]
    arguments: list[str]
    finish: str
    pieces: list[str]

    def same(self, other: Told) -> bool:
        return (self.text, self.names, self.arguments, self.finish) == (
            other.text,
            other.names,
            other.arguments,
            other.finish,
        )


def chat(base: str, *, stream: bool, **more: Any) -> Told:
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        tools: Any = [{"type": "function", "function": WRITE}]
        messages: Any = [{"role": "user", "content": QUESTION}]
        whole: Any
        pieces: list[str] = []
        if not stream:
            whole = client.chat.completions.create(model="any", messages=messages, tools=tools, **more)
        else:
            begun = 0
            with client.chat.completions.stream(model="any", messages=messages, tools=tools, **more) as events:
                for event in events:
                    if event.type != "chunk" or not event.chunk.choices:
                        continue
                    for new in event.chunk.choices[0].delta.tool_calls or ():
                        assert new.function is not None
                        begun += new.id is not None
                        assert (new.id is None) == (new.function.name is None) == (new.type is None)
                        assert new.index == begun - 1
                        pieces.append(new.function.arguments or "")
                whole = events.current_completion_snapshot
        (choice,) = whole.choices
        calls: Any = choice.message.tool_calls or []
        return Told(
            whole.id.removeprefix("chatcmpl-"),
            choice.message.content or "",
            [call.function.name for call in calls],
            [call.id for call in calls],
            [call.function.arguments for call in calls],
            choice.finish_reason,
            pieces,
        )


def responses(base: str, *, stream: bool, **more: Any) -> Told:
    if "max_tokens" in more:
        more["max_output_tokens"] = more.pop("max_tokens")
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        asked: Json = {"model": "any", "input": QUESTION, "tools": [{"type": "function", **WRITE}], **more}
        whole: Any
        pieces: list[str] = []
        if stream:
            with client.responses.stream(**asked) as events:
                for event in events:
                    if event.type == "response.function_call_arguments.delta":
                        pieces.append(event.delta)
                    if event.type in ("response.completed", "response.incomplete"):
                        whole = event.response
        else:
            whole = client.responses.create(**asked)
        calls = [item for item in whole.output if item.type == "function_call"]
        unfinished = [call.call_id for call in calls if call.status != "completed"]
        assert {call.status for call in calls} <= {"completed", "incomplete"}
        ready = whole.status == "completed" and len(calls) > len(unfinished)
        return Told(
            whole.id.removeprefix("resp_"),
            whole.output_text,
            [call.name for call in calls],
            [call.call_id for call in calls],
            [call.arguments for call in calls],
            "tool_calls" if ready else "stop" if whole.status == "completed" else "length",
            pieces,
        )


def messages(base: str, *, stream: bool, **more: Any) -> Told:
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as client:
        tool = {"name": "write", "input_schema": PARAMETERS}
        asked: Json = {"model": "any", "messages": [{"role": "user", "content": QUESTION}], "tools": [tool]}
        asked |= {"max_tokens": 1000, **more}
        whole: Any
        pieces: list[str] = []
        if stream:
            with client.messages.stream(**asked) as events:
                for event in events:
                    if event.type == "content_block_start" and event.content_block.type == "tool_use":
                        assert event.content_block.input == {}
                    if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                        pieces.append(event.delta.partial_json)
                whole = events.get_final_message()
        else:
            whole = client.messages.create(**asked)
        calls = [block for block in whole.content if block.type == "tool_use"]
        finish = {"tool_use": "tool_calls", "max_tokens": "length", "end_turn": "stop"}[str(whole.stop_reason)]
        return Told(
            whole.id.removeprefix("msg_"),
            "".join(block.text for block in whole.content if block.type == "text"),
            [call.name for call in calls],
            [call.id for call in calls],
            [json.dumps(call.input, ensure_ascii=False) for call in calls],
            finish,
            pieces,
        )


Ask = Callable[..., Told]
DIALECTS: list[Ask] = [chat, responses, messages]
ALONE: dict[Ask, Json] = {
    chat: {"parallel_tool_calls": False},
    responses: {"parallel_tool_calls": False},
    messages: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
}


@pytest.fixture(scope="module")
def every_token(shared: Rollout, folder: Path) -> Iterator[Running]:
    """A gateway that writes each token by itself."""
    with in_front(shared, folder, stream_flush_ms="0") as found:
        yield found


@pytest.fixture
def ask(common: Running, rollout: Rollout) -> Callable[..., tuple[Told, Told]]:
    """The same answer whole and streamed, each in a trajectory of its own."""

    def both(dialect: Ask, say: Say, **more: Any) -> tuple[Told, Told]:
        rollout.script += [say, say]
        suffix = "" if dialect is messages else "/v1"
        whole, streamed = (dialect(common.init()["base_url"] + suffix, stream=way, **more) for way in (False, True))
        return whole, streamed

    return both


@pytest.mark.parametrize("dialect", DIALECTS)
class TestWholeCalls:
    def test_a_stream_amounts_to_the_whole_answer(self, ask: Any, dialect: Ask) -> None:
        whole, streamed = ask(dialect, Say(f"I will.\n{written(FIRST)}\n{written(SECOND)}"))
        assert streamed.same(whole)
        assert whole.names == ["write", "write"]
        assert (whole.text, whole.finish) == ("I will.", "tool_calls")
        if dialect is messages:
            assert [json.loads(text) for text in whole.arguments] == [json.loads(FIRST), json.loads(SECOND)]
        else:
            assert whole.arguments == [FIRST, SECOND]
        for told in (whole, streamed):
            name = tool_call_ids(told.call_id, 0)
            assert told.ids == [name(0), name(1)]

    def test_arguments_come_in_pieces_as_they_were_written(
        self, every_token: Running, rollout: Rollout, dialect: Ask
    ) -> None:
        rollout.script.append(Say(f"{written(FIRST)}\n{written(SECOND)}"))
        base = every_token.init()["base_url"] + ("" if dialect is messages else "/v1")
        streamed = dialect(base, stream=True)
        assert "".join(streamed.pieces) == FIRST + SECOND
        assert len([piece for piece in streamed.pieces if piece]) > 10

    def test_arguments_that_are_flushed_together_are_the_same(self, ask: Any, dialect: Ask) -> None:
        _, streamed = ask(dialect, Say(f"{written(FIRST)}\n{written(SECOND)}"))
        assert "".join(streamed.pieces) == FIRST + SECOND

    def test_one_call_alone_is_the_first(self, ask: Any, dialect: Ask) -> None:
        whole, streamed = ask(dialect, Say(f"{written(FIRST)}\n{written(SECOND)}"), **ALONE[dialect])
        assert streamed.same(whole)
        assert (len(whole.names), whole.finish) == (1, "tool_calls")
        assert "".join(streamed.pieces) == FIRST

    @pytest.mark.parametrize("arguments", ["{}", "[1, 2]", '"text"', "17"])
    def test_arguments_of_any_kind(self, ask: Any, dialect: Ask, arguments: str) -> None:
        whole, streamed = ask(dialect, Say(written(arguments)))
        assert streamed.same(whole)
        assert whole.names == ["write"]


BROKEN = '<tool_call>\n{"name": "write", "arguments": {"path": "a", "lines": [1, '
#: Calls that break off, what of their arguments is JSON, and how the answer ends.
BROKEN_OFF = {
    "cut": (Say(BROKEN, ended=False), '{"path": "a", "lines": [1, ', "length"),
    "cut in a string": (Say(BROKEN + '"tw', ended=False), '{"path": "a", "lines": [1, "tw', "length"),
    "ended": (Say(BROKEN), '{"path": "a", "lines": [1, ', "stop"),
    "no JSON": (Say(BROKEN + "nothing]}}\n</tool_call>"), '{"path": "a", "lines": [1, ', "stop"),
}


@pytest.mark.parametrize("dialect", DIALECTS)
class TestCallsThatBreakOff:
    @pytest.mark.parametrize("case", BROKEN_OFF)
    def test_it_is_told_as_far_as_it_went_and_not_to_be_carried_out(self, ask: Any, dialect: Ask, case: str) -> None:
        say, begun, finish = BROKEN_OFF[case]
        whole, streamed = ask(dialect, say)
        assert streamed.same(whole)
        assert (whole.names, whole.finish) == (["write"], finish)
        if dialect is messages:
            assert json.loads(whole.arguments[0])["path"] == "a"
        else:
            assert whole.arguments[0].rstrip().startswith(begun.rstrip()[:-1])
        assert begun.startswith("".join(streamed.pieces)[: len(begun)])

    def test_another_call_that_is_whole_is_to_be_carried_out(self, ask: Any, dialect: Ask) -> None:
        whole, streamed = ask(dialect, Say(f"{BROKEN}x]}}}}\n</tool_call>\n{written(SECOND)}"))
        assert streamed.same(whole)
        assert (whole.names, whole.finish) == (["write", "write"], "tool_calls")
        whole, streamed = ask(dialect, Say(f"{BROKEN}x]}}}}\n</tool_call>\n{written(SECOND)}"), **ALONE[dialect])
        assert streamed.same(whole)
        assert (whole.names, whole.finish) == (["write"], "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_conversation_goes_on_from_a_call_that_was_cut(common: Running, rollout: Rollout, stream: bool) -> None:
    """An agent of Anthropic's keeps only what is whole of the arguments; it is known again by that."""
    base = common.init()["base_url"]
    rollout.script += [BROKEN_OFF["cut in a string"][0], "Too long."]
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as client:
        tool: Any = {"name": "write", "input_schema": PARAMETERS}
        given: list[Any] = [{"role": "user", "content": QUESTION}]
        asked: Any = {"model": "any", "max_tokens": 1000, "tools": [tool]}
        first: Any
        if stream:
            with client.messages.stream(**asked, messages=given) as events:
                first = events.get_final_message()
        else:
            first = client.messages.create(**asked, messages=given)
        (call,) = [block for block in first.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "it was cut", "is_error": True}
        given += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        client.messages.create(**asked, messages=given)
    steps = common.steps(base.split("/")[3])
    assert tree(steps) == [None, 0]


def cut_responses_raise(api: str, finish: str) -> AbstractContextManager[Any]:
    """The SDK takes no response that was cut, whatever is in it, and says so."""
    if (api, finish) == ("responses", "length"):
        return pytest.raises(ModelBehaviorError, match="incomplete")
    return nullcontext()


class TestAgents:
    @pytest.mark.parametrize("api", ["chat", "responses"])
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
    @pytest.mark.parametrize("case", BROKEN_OFF)
    async def test_the_agents_sdk_does_not_carry_it_out(
        self, common: Running, rollout: Rollout, api: str, stream: bool, case: str
    ) -> None:
        done: list[str] = []

        @function_tool
        def write(path: str, text: str = "", lines: list[int] | None = None) -> str:
            """Writes a file."""
            done.append(path)
            return "written"

        rollout.script += [BROKEN_OFF[case][0], "I could not."]
        client = openai.AsyncOpenAI(base_url=common.init()["base_url"] + "/v1", api_key="none", max_retries=0)
        provider = OpenAIProvider(openai_client=client, use_responses=api == "responses")
        config = RunConfig(model_provider=provider, tracing_disabled=True)
        agent: Agent[Any] = Agent(name="writer", tools=[write], model="any")
        with cut_responses_raise(api, BROKEN_OFF[case][2]):
            if stream:
                found = Runner.run_streamed(agent, QUESTION, run_config=config)
                async for _ in found.stream_events():
                    pass
            else:
                await Runner.run(agent, QUESTION, run_config=config)
        await client.close()
        assert done == []

    @pytest.mark.parametrize("case", BROKEN_OFF)
    def test_langchain_calls_it_invalid(self, common: Running, rollout: Rollout, case: str) -> None:
        rollout.script += [BROKEN_OFF[case][0]] * 2
        tools = [{"type": "function", "function": WRITE}]
        llm = ChatOpenAI(
            model="any", base_url=common.init()["base_url"], api_key=SecretStr("none"), max_retries=0
        ).bind_tools(tools)
        whole = llm.invoke([HumanMessage(QUESTION)])
        assert isinstance(whole, AIMessage)
        assert whole.tool_calls == []
        assert [call["name"] for call in whole.invalid_tool_calls] == ["write"]
        pieces: list[Any] = list(llm.stream([HumanMessage(QUESTION)]))
        total = pieces[0]
        for piece in pieces[1:]:
            total += piece
        assert total.response_metadata["finish_reason"] == BROKEN_OFF[case][2]
