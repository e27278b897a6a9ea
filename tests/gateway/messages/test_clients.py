"""The `anthropic` SDK as it is, with only its base_url changed; what was recorded is what the engine says it did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from tests.engine.kit import Client, hold_until_resumed
from tests.gateway.kit import Evidence, Json, Running, running_gateway, told, tree, until
from tests.gateway.messages.kit import TOOL, WAYS, added, answered, answered_async, calls_of, settled, text_of
from tests.gateway.tool_model import ADD, BOTH, EIGHT, FIVE, HELLO, HI, MORE, ONE, TWO

from headrace import DataPool

CALLS = 10
MOST = 96
#: This SDK has no name for the temperature any more; the wire has.
ASK: Json = {"model": "claude-any", "max_tokens": MOST, "tools": [TOOL], "extra_body": {"temperature": 0}}


class Agent:
    """Asks the model's two questions again and again and does what it calls for, as far as so many calls."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.said: list[str] = []

    def asks(self) -> Iterator[Json]:
        """What to ask; whoever takes it puts the answer into `heard` before the next."""
        for at in range(CALLS):
            if not self.messages or self.messages[-1]["role"] == "assistant":
                self.messages.append({"role": "user", "content": (ONE, MORE)[len(self.said) % 2]})
            yield {**ASK, "messages": self.messages}
            assert len(self.said) <= at + 1

    def heard(self, message: anthropic.types.Message) -> None:
        self.messages.append({"role": "assistant", "content": message.content})
        calls = calls_of(message)
        assert message.stop_reason == ("max_tokens" if message.usage.output_tokens == MOST else _reason(calls))
        if calls:
            self.messages.append({"role": "user", "content": [added(call) for call in calls]})
        else:
            self.said.append(text_of(message))


def _reason(calls: list[Any]) -> str:
    return "tool_use" if calls else "end_turn"


def held(agency: Running, witness: Evidence, uid: str, agent: Agent, counted: list[int]) -> None:
    assert agent.said[:2] == [FIVE, EIGHT]
    steps = agency.steps(uid)
    witness.holds(steps)
    assert tree(steps) == [None, *range(CALLS - 1)]
    assert counted == [len(step.prompt_ids) for step in steps]


@pytest.mark.parametrize("way", WAYS)
def test_the_sync_client_holds_a_conversation_with_tools(agency: Running, witness: Evidence, way: str) -> None:
    begun, agent, counted = agency.init(), Agent(), []
    with anthropic.Anthropic(**settled(begun["base_url"])) as client:
        for asked in agent.asks():
            about = {name: asked[name] for name in ("model", "messages", "tools")}
            counted.append(client.messages.count_tokens(**about).input_tokens)
            message = answered(client, way, asked)
            assert message.usage.input_tokens == counted[-1]
            agent.heard(message)
    held(agency, witness, begun["trajectory_uid"], agent, counted)


@pytest.mark.parametrize("way", WAYS)
async def test_the_async_client_holds_a_conversation_with_tools(agency: Running, witness: Evidence, way: str) -> None:
    begun, agent, counted = agency.init(), Agent(), []
    async with anthropic.AsyncAnthropic(**settled(begun["base_url"])) as client:
        for asked in agent.asks():
            message = await answered_async(client, way, asked)
            counted.append(message.usage.input_tokens)
            agent.heard(message)
    held(agency, witness, begun["trajectory_uid"], agent, counted)


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_with_two_calls_takes_two_results(agency: Running, witness: Evidence, way: str) -> None:
    begun = agency.init()
    messages: list[Any] = [{"role": "user", "content": TWO}]
    with anthropic.Anthropic(**settled(begun["base_url"])) as client:
        first = answered(client, way, {**ASK, "messages": messages})
        assert [call.input for call in calls_of(first)] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        results = [added(call) for call in calls_of(first)]
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        assert text_of(answered(client, way, {**ASK, "messages": messages})) == BOTH
        alone = {"type": "auto", "disable_parallel_tool_use": True}
        only = answered(client, way, {**ASK, "messages": messages[:1], "tool_choice": alone})
        assert [call.input for call in calls_of(only)] == [{"a": 1, "b": 2}]
    steps = agency.steps(begun["trajectory_uid"])
    witness.holds(steps)
    assert tree(steps) == [None, 0, None]


def test_the_same_conversation_has_the_same_ids_as_in_chat_and_goes_on_there(
    agency: Running, witness: Evidence
) -> None:
    """Turn about: a question and its tool in one dialect, the next in the other, in one trajectory."""
    begun = agency.init()
    chat = f"{begun['base_url']}/v1/chat/completions"
    with anthropic.Anthropic(**settled(begun["base_url"])) as client:
        messages: list[Any] = [{"role": "user", "content": ONE}]
        first = answered(client, "whole", {**ASK, "messages": messages})
        (call,) = calls_of(first)
        asked: Json = {"model": "any", "temperature": 0, "tools": [ADD]}
        made = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": '{"b": 3, "a": 2}'}}
        spoken: list[Json] = [
            {"role": "user", "content": ONE},
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": call.id, "content": "5"},
        ]
        said = told(agency.post(chat, {**asked, "messages": spoken}))["choices"][0]["message"]["content"]
        assert said == FIVE
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [added(call)]},
            {"role": "assistant", "content": said},
            {"role": "user", "content": MORE},
        ]
        answered(client, "events", {**ASK, "messages": messages})
        told(agency.post(chat, {**asked, "messages": spoken[:1], "max_tokens": 48}))
    steps = agency.steps(begun["trajectory_uid"])
    witness.holds(steps)
    assert tree(steps) == [None, 0, 1, None]
    assert steps[3].prompt_ids.tolist() == steps[0].prompt_ids.tolist()


def test_text_comes_in_pieces(agency: Running) -> None:
    base = agency.init()["base_url"]
    told(agency.post(f"{base}/v1/register_trajectory", {"channel": "every"}))
    with anthropic.Anthropic(**settled(base)) as client:
        asked: Json = {**ASK, "tools": [], "messages": [{"role": "user", "content": HELLO}]}
        with client.messages.stream(**asked) as stream:
            pieces = list(stream.text_stream)
    assert "".join(pieces) == HI
    assert len(pieces) > 2


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_headers_tell_the_request(agency: Running, prefix: str) -> None:
    begun = agency.init()
    body = {"max_tokens": 48, "messages": [{"role": "user", "content": HELLO}]}
    answer = agency.post(f"{begun['base_url']}{prefix}/messages?beta=true", body)
    (step,) = agency.steps(begun["trajectory_uid"])
    assert told(answer)["id"] == f"msg_{step.call_id}"
    assert answer.headers["request-id"] == f"req_{step.call_id}"
    assert answer.headers["x-headrace-call"] == step.call_id


def test_an_answer_that_was_lost_is_given_again(agency: Running) -> None:
    begun = agency.init()
    for way in WAYS:
        with anthropic.Anthropic(**settled(begun["base_url"])) as client:
            asked: Json = {
                "model": "any",
                "max_tokens": 20,
                "messages": [{"role": "user", "content": f"{HELLO} {way}"}],
            }
            first = answered(client, way, asked)
            again = answered(client, way, {**asked, "extra_headers": {"x-stainless-retry-count": "1"}})
        assert (again.id, again.content, again.usage) == (first.id, first.content, first.usage)
    assert len(agency.steps(begun["trajectory_uid"])) == len(WAYS)


def test_an_agent_that_leaves_a_stream_leaves_no_step(pool: DataPool, own: Client, folder: Path) -> None:
    asked: Json = {"model": "any", "max_tokens": 1900, "messages": [{"role": "user", "content": "guess"}]}
    with running_gateway(pool, f"http://{own.host}", folder) as gateway:
        evidence = Evidence(own)
        hold_until_resumed(own, steps=8)
        begun = gateway.init()
        with anthropic.Anthropic(**settled(begun["base_url"])) as client:
            stream = client.messages.create(**asked, stream=True, extra_body={"ignore_eos": True})
            next(iter(stream))
            stream.close()
        until(lambda: gateway.counted("unrecorded") == {"agent_left": 1})
        until(lambda: len(evidence.calls()) == 1)
        assert gateway.steps(begun["trajectory_uid"]) == []
