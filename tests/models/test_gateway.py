"""Five turns with a few families of every form, through a real gateway, in every dialect, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.gateway.kit import Json, Running, told, tree
from tests.gateway.responses.kit import ADD, checked, events_of, respond
from tests.gateway.rollout import Rollout, Say, in_front, uid_of
from tests.matrix import crossed
from tests.models import corpus
from tests.models.conftest import families

from headrace.checkup.model import ONE, SEVERAL, SYSTEM, TOOLS
from headrace.checkup.scripted import TemplateSpeaker
from headrace.tokens import Message, ToolCall, load_renderer, load_vocabulary

FAMILIES = (
    "qwen3",
    "qwen3-coder",
    "deepseek-v3.1",
    "gpt-oss",
    "mistral-small-3.2",
    "glm-4.6",
    "kimi-k2",
    "minimax-m2",
    "apertus",
    "lfm2",
    "gemma4",
    "mistral-7b-v3",
)
#: Of each way of writing calls one; the others are of the long tier.
UNLIKE = ("qwen3", "deepseek-v3.1", "gpt-oss", "mistral-small-3.2")
#: Those whose template writes one call an answer.
ONE_CALL = ("gpt-oss",)
Answer = tuple[str, list[tuple[str, str, Any]]]
Ask = Callable[[list[Message], bool], Answer]


class Clients:
    """The SDKs on one trajectory: each is told the whole conversation, and tells the model's turn."""

    def __init__(self, base_url: str) -> None:
        told: Json = {"api_key": "none", "max_retries": 0, "timeout": 300}
        self.openai = openai.OpenAI(base_url=base_url + "/v1", **told)
        self.anthropic = anthropic.Anthropic(base_url=base_url, **told)

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()

    def chat(self, messages: list[Message], stream: bool) -> Answer:
        given: list[Any] = [_chat_message(message) for message in messages]
        asked: Json = {"model": "any", "messages": given, "tools": TOOLS, "max_tokens": 1000}
        if stream:
            with self.openai.chat.completions.stream(**asked) as events:
                said: Any = events.get_final_completion().choices[0]
        else:
            said = self.openai.chat.completions.create(**asked).choices[0]
        calls = [
            (call.id, call.function.name, json.loads(call.function.arguments)) for call in said.message.tool_calls or []
        ]
        assert said.finish_reason == ("tool_calls" if calls else "stop")
        return said.message.content or "", calls

    def responses(self, messages: list[Message], stream: bool) -> Answer:
        items = [item for message in messages for item in _items(message)]
        tools: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
        asked: Json = {"model": "any", "input": items, "tools": tools, "max_output_tokens": 1000, "store": False}
        if stream:
            with self.openai.responses.stream(**asked) as events:
                found: Any = events.get_final_response()
        else:
            found = self.openai.responses.create(**asked)
        made = [item for item in found.output if item.type == "function_call"]
        return found.output_text, [(item.call_id, item.name, json.loads(item.arguments)) for item in made]

    def messages(self, messages: list[Message], stream: bool) -> Answer:
        tools: list[Any] = [
            {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
            | {"description": tool["function"]["description"]}
            for tool in TOOLS
        ]
        turns: list[Any] = []
        for message in messages:
            turn = _anthropic(message)
            if turn is None:
                continue
            if turns and turns[-1]["role"] == turn["role"]:
                turns[-1]["content"] += turn["content"]
            else:
                turns.append(turn)
        asked: Json = {"model": "any", "messages": turns, "tools": tools, "max_tokens": 1000}
        asked["system"] = SYSTEM.content
        if stream:
            with self.anthropic.messages.stream(**asked) as events:
                found: Any = events.get_final_message()
        else:
            found = self.anthropic.messages.create(**asked)
        calls = [(block.id, block.name, block.input) for block in found.content if block.type == "tool_use"]
        assert found.stop_reason == ("tool_use" if calls else "end_turn")
        return "".join(block.text for block in found.content if block.type == "text"), calls


def _chat_message(message: Message) -> Json:
    told: Json = {"role": message.role, "content": message.content}
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        told["tool_call_id"] = message.tool_call_id
    return told


def _items(message: Message) -> list[Json]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id, "output": message.content}]
    items: list[Json] = [{"role": message.role, "content": message.content}] if message.content else []
    for call in message.tool_calls:
        made = {"call_id": call.id, "name": call.name, "arguments": json.dumps(call.arguments)}
        items.append({"type": "function_call", **made})
    return items


def _anthropic(message: Message) -> Json | None:
    if message.role == "system":
        return None
    if message.role == "tool":
        result = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.content}
        return {"role": "user", "content": [result]}
    blocks: list[Json] = [{"type": "text", "text": message.content}] if message.content else []
    blocks += [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in message.tool_calls]
    return {"role": message.role, "content": blocks}


class Stage:
    """A gateway in front of a scripted server of one family."""

    def __init__(self, name: str, folder: Path, rollout: Rollout, gateway: Running) -> None:
        self.name, self.gateway, self.rollout = name, gateway, rollout
        self.scripted = TemplateSpeaker(load_renderer(rollout.vocabulary))

    def says(self, messages: Sequence[Message], answer: Message) -> Message:
        """The server's next answer; what of it the template writes."""
        meant = self.scripted.sample([], messages, TOOLS, answer).answer

        def reply(asked: Json) -> Say:
            sampled = self.scripted.sample(asked["prompt"], messages, TOOLS, answer)
            return Say(ids=sampled.ids, ended=False, shown=sampled.text, finish="stop")

        self.rollout.reply = reply
        return meant


@pytest.fixture(scope="module", params=families(FAMILIES, always=UNLIKE))
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    folder = corpus.folder(request.param)
    vocabulary = load_vocabulary(folder)
    with Rollout(vocabulary, vocabulary.hf.eos_token) as rollout, in_front(rollout, folder) as gateway:
        yield Stage(request.param, folder, rollout, gateway)


@pytest.mark.parametrize(("dialect", "stream"), crossed(["chat", "responses", "messages"], [True, False]))
def test_five_turns_are_one_line_of_steps(stage: Stage, dialect: str, stream: bool) -> None:
    base = stage.gateway.init()["base_url"]
    clients = Clients(base)
    ask: Ask = getattr(clients, dialect)
    messages = [SYSTEM, Message("user", "Wie spät ist es in Zürich? 日本 🙂")]
    several = SEVERAL[1:] if stage.name in ONE_CALL else SEVERAL
    script = [
        (Message("assistant", "", "I must look it up.", ONE), ["12:30"]),
        (Message("assistant", "", None, several), ["found", "sent"]),
        (Message("assistant", "Es ist 12:30 – 🙂", "Now I know."), []),
        (Message("assistant", "", "Once more.", ONE), ["20:30"]),
        (Message("assistant", "20:30.", None), []),
    ]
    try:
        for answer, results in script:
            meant = stage.says(messages, answer)
            content, calls = ask(messages, stream)
            assert content.strip() == meant.content
            assert [(name, given) for _, name, given in calls] == [(c.name, c.arguments) for c in meant.tool_calls]
            made = tuple(ToolCall(name, given, call_id) for call_id, name, given in calls)
            messages.append(Message("assistant", content, None, made))
            messages += [Message("tool", text, None, (), c.id, c.name) for c, text in zip(made, results, strict=False)]
            if not results:
                messages.append(Message("user", "And in 東京?"))
    finally:
        clients.close()
    steps = stage.gateway.steps(uid_of(base))
    assert [step.quarantined for step in steps] == [None] * 5
    assert tree(steps) == [None, 0, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_prompt_of_text_is_completed(stage: Stage, stream: bool) -> None:
    base = stage.gateway.init()["base_url"]
    sampled = stage.scripted.sample([], [Message("user", "Hello?")], (), Message("assistant", "Grüße, 日本 🙂"))
    stage.rollout.reply = lambda asked: Say(ids=sampled.ids, ended=False, shown=sampled.text, finish="stop")
    asked = {"model": "any", "prompt": "Hello?", "max_tokens": 100, "stream": stream}
    answer = stage.gateway.post(f"{base}/v1/completions", asked)
    assert answer.status_code == 200, answer.text
    assert [step.quarantined for step in stage.gateway.steps(uid_of(base))] == [None]


IN_TURNS = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>Let me add.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>the two<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
)


@pytest.mark.xdist_group("gpt-oss")
def test_an_answer_that_thinks_between_its_words_is_gone_on_from() -> None:
    """A stream shows it as items that take turns; sent whole, without their ids, or named by them, they are one."""
    folder = corpus.folder("gpt-oss")
    vocabulary = load_vocabulary(folder)
    with Rollout(vocabulary, "<|call|>") as rollout, in_front(rollout, folder) as gateway:
        base = gateway.init()["base_url"]
        rollout.script.append(Say(ids=vocabulary.encode(IN_TURNS), ended=False, finish="stop"))
        asked = [{"role": "user", "content": "1 + 2?"}]
        items = checked(events_of(respond(gateway, base, asked, tools=[ADD], stream=True).text))["output"]
        assert [item["type"] for item in items] == ["reasoning", "message", "reasoning", "function_call"]
        assert len({item["id"] for item in items}) == len(items)
        result = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "3"}
        unnamed = [{name: item[name] for name in item if name != "id"} for item in items]
        referred = [{"type": "item_reference", "id": item["id"]} for item in items]
        for kept in (items, unnamed, referred):
            rollout.script.append("<|channel|>final<|message|>3")
            told(respond(gateway, base, [*asked, *kept, result], tools=[ADD]))
        assert tree(gateway.steps(uid_of(base))) == [None, 0, 0, 0]
