"""The `openai` SDK as it is, with only its base_url changed; what was recorded is what the engine says it did."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.engine.kit import Client, hold_until_resumed
from tests.gateway.kit import Evidence, Json, Running, running_gateway, told, tree, until
from tests.gateway.tool_model import ADD, BOTH, EIGHT, FIVE, HELLO, HI, MORE, ONE, STRICT, TWO

from headrace import DataPool

#: Base URLs are given both with and without OpenAI's /v1.
PREFIXES = ["", "/v1"]
#: How agents keep an answer for the next turn.
KEPT: dict[str, Callable[[Any], Any]] = {
    "the object": lambda message: message,
    "every field": lambda message: message.model_dump(),
    "the set fields": lambda message: message.model_dump(exclude_none=True),
    "by hand": lambda message: {
        "tool_calls": [
            {"function": {"arguments": " " + call.function.arguments, "name": call.function.name}, **_rest(call)}
            for call in message.tool_calls or []
        ]
        or None,
        "content": message.content or "",
        "role": "assistant",
    },
}


def _rest(call: Any) -> Json:
    return {"type": "function", "id": call.id}


def added(call: Any) -> Json:
    """The tool, and its result as a message."""
    given = json.loads(call.function.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])}


def settled(base_url: str, **more: Any) -> Json:
    return {"base_url": base_url, "api_key": "none", "max_retries": 0, **more}


class Agent:
    """Answers questions with the tool, until the model calls none."""

    def __init__(self, client: openai.OpenAI, keep: Callable[[Any], Any] = KEPT["the object"]) -> None:
        self.client = client
        self.keep = keep
        self.messages: list[Any] = []

    def ask(self, question: str) -> str:
        self.messages.append({"role": "user", "content": question})
        while True:
            answer = self.client.chat.completions.create(
                model="any", messages=self.messages, tools=[ADD], temperature=0
            ).choices[0]
            self.messages.append(self.keep(answer.message))
            if answer.finish_reason != "tool_calls":
                return answer.message.content or ""
            self.messages += [added(call) for call in answer.message.tool_calls or []]


class TestConversations:
    @pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
    @pytest.mark.parametrize("prefix", PREFIXES)
    def test_the_sync_client_holds_a_conversation_with_tools(
        self, agency: Running, witness: Evidence, prefix: str, keep: Callable[[Any], Any]
    ) -> None:
        begun = agency.init()
        with openai.OpenAI(**settled(begun["base_url"] + prefix)) as client:
            agent = Agent(client, keep)
            assert [agent.ask(ONE), agent.ask(MORE)] == [FIVE, EIGHT]
        steps = agency.steps(begun["trajectory_uid"])
        witness.holds(steps)
        assert tree(steps) == [None, 0, 1, 2]
        assert [step.finish_reason for step in steps] == ["stop"] * 4

    @pytest.mark.parametrize("prefix", PREFIXES)
    async def test_the_async_client_holds_a_conversation_with_tools(
        self, agency: Running, witness: Evidence, prefix: str
    ) -> None:
        begun = agency.init()
        async with openai.AsyncOpenAI(**settled(begun["base_url"] + prefix)) as client:
            said = await _asked(client, [ONE, MORE])
        assert said == [FIVE, EIGHT]
        steps = agency.steps(begun["trajectory_uid"])
        witness.holds(steps)
        assert tree(steps) == [None, 0, 1, 2]

    async def test_agents_at_once_do_not_mix(self, agency: Running, witness: Evidence) -> None:
        begun = [agency.init(prompt_uid="together") for _ in range(6)]
        clients = [openai.AsyncOpenAI(**settled(each["base_url"])) for each in begun]
        said = await asyncio.gather(*(_asked(client, [ONE, MORE]) for client in clients))
        assert said == [[FIVE, EIGHT]] * 6
        for client in clients:
            await client.close()
        recorded = [agency.steps(each["trajectory_uid"]) for each in begun]
        witness.holds([step for steps in recorded for step in steps])
        assert [tree(steps) for steps in recorded] == [[None, 0, 1, 2]] * 6

    def test_an_answer_with_two_calls_takes_two_results(self, agency: Running, witness: Evidence) -> None:
        begun = agency.init()
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            agent = Agent(client)
            assert agent.ask(TWO) == BOTH
        calls = agent.messages[1].tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        assert len({call.id for call in calls}) == 2
        steps = agency.steps(begun["trajectory_uid"])
        witness.holds(steps)
        assert tree(steps) == [None, 0]

    def test_a_sub_agent_and_another_question_are_branches(self, agency: Running, witness: Evidence) -> None:
        begun = agency.init()
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            main, sub = Agent(client), Agent(client)
            assert main.ask(ONE) == FIVE
            assert sub.ask(HELLO) == HI
            before = list(main.messages)
            assert main.ask(MORE) == EIGHT
            differently: list[Any] = [*before, {"role": "user", "content": TWO}]
            client.chat.completions.create(model="any", messages=differently, tools=[ADD], temperature=0, max_tokens=9)
        steps = agency.steps(begun["trajectory_uid"])
        witness.holds(steps)
        assert tree(steps) == [None, 0, None, 1, 3, 1]

    def test_what_was_shown_garbled_is_continued_with_the_tokens_that_were_sampled(
        self, gateway: Running, evidence: Evidence
    ) -> None:
        """Random weights say bytes that are no text: encoding what the agent sends back would give other ids."""
        begun = gateway.init()
        messages: list[Any] = []
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            for turn in range(6):
                messages.append({"role": "user", "content": f"turn {turn}"})
                answer = client.chat.completions.create(
                    model="any", messages=messages, temperature=1, seed=turn, max_tokens=40
                )
                messages.append(answer.choices[0].message)
        assert any("\ufffd" in message.content for message in messages[1::2])
        steps = gateway.steps(begun["trajectory_uid"])
        evidence.holds(steps)
        assert tree(steps) == [None, 0, 1, 2, 3, 4]

    def test_each_choice_is_a_step_and_any_may_be_continued(self, gateway: Running, evidence: Evidence) -> None:
        begun = gateway.init()
        question = {"role": "user", "content": "guess"}
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            ask = {"model": "any", "seed": 7, "max_tokens": 12}
            choices = client.chat.completions.create(messages=[question], n=3, **ask).choices
            assert [choice.index for choice in choices] == [0, 1, 2]
            client.chat.completions.create(messages=[question, choices[1].message, question], **ask)
        steps = gateway.steps(begun["trajectory_uid"])
        evidence.holds(steps)
        assert tree(steps) == [None, None, None, 1]


async def _asked(client: openai.AsyncOpenAI, questions: list[str]) -> list[str]:
    messages: list[Any] = []
    said: list[str] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        while True:
            answer = await client.chat.completions.create(model="any", messages=messages, tools=[ADD], temperature=0)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                said.append(message.content or "")
                break
            messages += [added(call) for call in message.tool_calls]
    return said


class TestStreams:
    @pytest.mark.parametrize("prefix", PREFIXES)
    def test_a_streamed_conversation_with_tools(self, agency: Running, witness: Evidence, prefix: str) -> None:
        begun = agency.init()
        messages: list[Any] = []
        said = []
        with openai.OpenAI(**settled(begun["base_url"] + prefix)) as client:
            for question in (ONE, MORE):
                messages.append({"role": "user", "content": question})
                while True:
                    chunks = list(
                        client.chat.completions.create(
                            model="any", messages=messages, tools=[ADD], temperature=0, stream=True
                        )
                    )
                    message = put_together(chunks)
                    messages.append(message)
                    if "tool_calls" not in message:
                        said.append(message["content"])
                        break
                    messages += [_answered(call) for call in message["tool_calls"]]
        assert said == [FIVE, EIGHT]
        steps = agency.steps(begun["trajectory_uid"])
        witness.holds(steps)
        assert tree(steps) == [None, 0, 1, 2]

    async def test_a_streamed_answer_with_two_calls(self, agency: Running, witness: Evidence) -> None:
        begun = agency.init()
        messages: list[Any] = [{"role": "user", "content": TWO}]
        async with openai.AsyncOpenAI(**settled(begun["base_url"])) as client:
            first = put_together(await _streamed(client, messages))
            assert [json.loads(call["function"]["arguments"]) for call in first["tool_calls"]] == [
                {"a": 1, "b": 2},
                {"a": 3, "b": 4},
            ]
            messages += [first, *map(_answered, first["tool_calls"])]
            assert put_together(await _streamed(client, messages)) == {"role": "assistant", "content": BOTH}
        steps = agency.steps(begun["trajectory_uid"])
        witness.holds(steps)
        assert tree(steps) == [None, 0]

    def test_text_comes_in_pieces_and_the_usage_last(self, agency: Running, witness: Evidence) -> None:
        begun = agency.init()
        told(agency.post(f"{begun['base_url']}/v1/register_trajectory", {"channel": "every"}))
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            *chunks, last = client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": HELLO}],
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
        assert "".join(pieces) == HI
        assert len(pieces) > 2
        (step,) = agency.steps(begun["trajectory_uid"])
        witness.holds([step])
        assert last.choices == []
        assert last.usage.prompt_tokens == len(step.prompt_ids)
        assert last.usage.completion_tokens == len(step.response_ids)

    def test_the_helper_for_streams_puts_calls_together(self, agency: Running, witness: Evidence) -> None:
        begun = agency.init()
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            messages: list[Any] = [{"role": "user", "content": TWO}]
            ask: Json = {"model": "any", "tools": [STRICT], "temperature": 0}
            with client.chat.completions.stream(messages=messages, **ask) as events:
                kinds = {event.type for event in events}
                first = events.get_final_completion().choices[0].message
            assert "tool_calls.function.arguments.done" in kinds
            assert [call.function.parsed_arguments for call in first.tool_calls] == [
                {"a": 1, "b": 2},
                {"a": 3, "b": 4},
            ]
            messages += [first, *map(added, first.tool_calls)]
            with client.chat.completions.stream(messages=messages, **ask) as events:
                assert events.get_final_completion().choices[0].message.content == BOTH
        steps = agency.steps(begun["trajectory_uid"])
        witness.holds(steps)
        assert tree(steps) == [None, 0]

    def test_the_helper_for_parsing_reads_calls(self, agency: Running, witness: Evidence) -> None:
        begun = agency.init()
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            messages: list[Any] = [{"role": "user", "content": ONE}]
            ask: Json = {"model": "any", "tools": [STRICT], "temperature": 0}
            first = client.chat.completions.parse(messages=messages, **ask).choices[0].message
            assert first.tool_calls[0].function.parsed_arguments == {"a": 2, "b": 3}
            messages += [first, added(first.tool_calls[0])]
            assert client.chat.completions.parse(messages=messages, **ask).choices[0].message.content == FIVE
        steps = agency.steps(begun["trajectory_uid"])
        witness.holds(steps)
        assert tree(steps) == [None, 0]


async def _streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> list[Any]:
    stream = await client.chat.completions.create(
        model="any", messages=messages, tools=[ADD], temperature=0, stream=True
    )
    return [chunk async for chunk in stream]


def put_together(chunks: list[Any]) -> Json:
    """The message that a stream's deltas amount to, as agents write it themselves."""
    assert len({chunk.id for chunk in chunks}) == 1
    content, calls = "", {}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or []:
            if call.index not in calls:
                calls[call.index] = {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
            calls[call.index]["function"]["name"] += call.function.name or ""
            calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == ("tool_calls" if calls else "stop")
    message: Json = {"role": "assistant", "content": content}
    return {**message, "tool_calls": [calls[at] for at in sorted(calls)]} if calls else message


def _answered(call: Json) -> Json:
    given = json.loads(call["function"]["arguments"])
    return {"role": "tool", "tool_call_id": call["id"], "content": str(sum(given.values()))}


class TestCompletions:
    def test_a_text_that_grows_is_one_line_of_steps(self, gateway: Running, evidence: Evidence) -> None:
        begun = gateway.init()
        text = "Guess a number"
        with openai.OpenAI(**settled(begun["base_url"] + "/v1")) as client:
            for turn in range(3):
                answer = client.completions.create(model="any", prompt=text, max_tokens=10, seed=turn)
                text += answer.choices[0].text + " higher"
        steps = gateway.steps(begun["trajectory_uid"])
        evidence.holds(steps)
        assert tree(steps) == [None, 0, 1]

    def test_ids_are_consumed_as_they_are(self, gateway: Running, evidence: Evidence) -> None:
        begun = gateway.init()
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            client.completions.create(model="any", prompt=[5, 6, 7], max_tokens=4, seed=1)
        (step,) = gateway.steps(begun["trajectory_uid"])
        evidence.holds([step])
        assert step.prompt_ids.tolist() == [5, 6, 7]

    def test_a_stream_says_the_same_text(self, gateway: Running, evidence: Evidence) -> None:
        begun = gateway.init()
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            ask: Json = {"model": "any", "prompt": "the number is", "max_tokens": 12, "seed": 3}
            whole = client.completions.create(**ask).choices[0].text
            pieces = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]
        assert "".join(pieces) == whole
        steps = gateway.steps(begun["trajectory_uid"])
        evidence.holds(steps)
        assert tree(steps) == [None, None]


class TestTools:
    def test_calls_that_are_not_wanted_are_text(self, agency: Running, witness: Evidence) -> None:
        begun = agency.init()
        messages: list[Any] = [{"role": "user", "content": ONE}]
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            ask: Json = {"model": "any", "tools": [ADD], "tool_choice": "none", "temperature": 0}
            answer = client.chat.completions.create(messages=messages, **ask).choices[0]
            assert answer.finish_reason == "stop"
            assert answer.message.tool_calls is None
            assert (answer.message.content or "").startswith("<tool_call>")
            messages += [answer.message, {"role": "user", "content": MORE}]
            client.chat.completions.create(messages=messages, **ask, max_tokens=9)
        steps = agency.steps(begun["trajectory_uid"])
        witness.holds(steps)
        assert tree(steps) == [None, 0]

    @pytest.mark.parametrize("stream", [False, True])
    def test_only_one_call_is_shown_where_no_more_are_wanted(
        self, agency: Running, witness: Evidence, stream: bool
    ) -> None:
        """Both were sampled and stay in the context; the agent that saw one goes on from both."""
        begun = agency.init()
        messages: list[Any] = [{"role": "user", "content": TWO}]
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            ask: Json = {"model": "any", "tools": [ADD], "parallel_tool_calls": False, "temperature": 0}
            if stream:
                message = put_together(list(client.chat.completions.create(messages=messages, stream=True, **ask)))
            else:
                message = client.chat.completions.create(messages=messages, **ask).choices[0].message.model_dump()
            (call,) = message["tool_calls"]
            messages += [message, _answered(call)]
            client.chat.completions.create(messages=messages, **ask, max_tokens=9)
        steps = agency.steps(begun["trajectory_uid"])
        witness.holds(steps)
        assert tree(steps) == [None, 0]

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
    def test_a_call_that_must_be_made_is_refused_where_the_server_cannot_see_to_it(
        self, agency: Running, choice: Any
    ) -> None:
        begun = agency.init()
        question: Json = {"role": "user", "content": HELLO}
        with (
            openai.OpenAI(**settled(begun["base_url"])) as client,
            pytest.raises(openai.BadRequestError, match="structured outputs"),
        ):
            client.chat.completions.create(model="any", messages=[question], tools=[ADD], tool_choice=choice)
        assert agency.steps(begun["trajectory_uid"]) == []


class TestBeside:
    def test_the_models_are_the_rollout_servers(self, agency: Running) -> None:
        with openai.OpenAI(**settled(agency.init()["base_url"] + "/v1")) as client:
            assert [model.id for model in client.models.list()] == ["taught"]

    def test_any_model_name_is_echoed(self, agency: Running) -> None:
        with openai.OpenAI(**settled(agency.init()["base_url"])) as client:
            answer = client.chat.completions.create(
                model="gpt-9", messages=[{"role": "user", "content": HELLO}], temperature=0
            )
        assert answer.model == "gpt-9"

    def test_log_probs_that_are_asked_for_are_the_recorded_ones(self, gateway: Running, evidence: Evidence) -> None:
        begun = gateway.init()
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            answer = client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": "guess"}],
                logprobs=True,
                top_logprobs=2,
                max_tokens=6,
                seed=1,
            )
        entries = answer.choices[0].logprobs.content
        (step,) = gateway.steps(begun["trajectory_uid"])
        evidence.holds([step])
        assert [entry.logprob for entry in entries] == pytest.approx(step.rollout_log_probs.tolist(), abs=1e-6)
        assert [len(entry.top_logprobs) for entry in entries] == [2] * 6

    def test_headers_name_the_call_and_the_version(self, agency: Running) -> None:
        told(agency.post("/policy_version", {"version": 3}))
        begun = agency.init()
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            answer = client.chat.completions.with_raw_response.create(
                model="any", messages=[{"role": "user", "content": HELLO}], temperature=0
            )
        (step,) = agency.steps(begun["trajectory_uid"])
        assert answer.headers["x-headrace-call"] == step.call_id
        assert answer.headers["x-headrace-policy-version"] == str(step.policy_version) == "3"

    def test_ids_are_shown_to_an_agent_that_asks_for_them(self, gateway: Running, evidence: Evidence) -> None:
        begun = gateway.init()
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            answer = client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": "guess"}],
                max_tokens=6,
                extra_body={"return_token_ids": True, "top_k": 5},
            )
        (step,) = gateway.steps(begun["trajectory_uid"])
        evidence.holds([step])
        assert answer.model_extra["prompt_token_ids"] == step.prompt_ids.tolist()
        assert answer.choices[0].model_extra["token_ids"] == step.response_ids.tolist()
        assert step.sampling["top_k"] == 5

    @pytest.mark.parametrize("uid", ["a b", "a/b", "ü%20?#", "run:1@x"])
    def test_any_uid_survives_the_way_through_a_base_url(self, agency: Running, witness: Evidence, uid: str) -> None:
        begun = agency.init(trajectory_uid=uid, prompt_uid=uid + "!")
        with openai.OpenAI(**settled(begun["base_url"])) as client:
            assert Agent(client).ask(ONE) == FIVE
        steps = agency.steps(uid)
        witness.holds(steps)
        assert {step.prompt_uid for step in steps} == {uid + "!"}

    def test_an_agent_that_leaves_a_stream_leaves_no_step(self, pool: DataPool, own: Client, folder: Path) -> None:
        with running_gateway(pool, f"http://{own.host}", folder) as gateway:
            evidence = Evidence(own)
            hold_until_resumed(own, steps=8)
            begun = gateway.init()
            with openai.OpenAI(**settled(begun["base_url"])) as client:
                stream = client.chat.completions.create(
                    model="any",
                    messages=[{"role": "user", "content": "guess"}],
                    max_tokens=1900,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                next(iter(stream))
                stream.close()
            until(lambda: gateway.counted("unrecorded") == {"agent_left": 1})
            until(lambda: len(evidence.calls()) == 1)
            assert evidence.calls()[0]["finish_reason"] == "abort"
            assert gateway.steps(begun["trajectory_uid"]) == []
