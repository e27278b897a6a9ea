"""One conversation, three dialects: the same ids whichever is spoken, and one line of steps when they take turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.gateway.kit import Evidence, Json, Running, tree
from tests.gateway.rollout import Rollout, in_front
from tests.gateway.tool_model import ADD, EIGHT, FIVE, MORE, ONE

ADD_FUNCTION: Json = ADD["function"]


class Turn:
    """What was said, in no dialect: by the user, by the model (text, and calls by id), or by the tool (of a call)."""

    def __init__(self, who: str, text: str, calls: Sequence[tuple[str, Json]] = (), answers: str = "") -> None:
        self.who, self.text, self.calls, self.answers = who, text, list(calls), answers


class Clients:
    """The three SDKs on one trajectory. Each is told the whole conversation, and tells the model's turn: of its calls
    those that a client is told to make."""

    def __init__(self, base_url: str, system: str | None) -> None:
        self.system = system
        told: Json = {"api_key": "none", "max_retries": 0}
        self.openai = openai.OpenAI(base_url=base_url + "/v1", **told)
        self.anthropic = anthropic.Anthropic(base_url=base_url, **told)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self.openai.close()
        self.anthropic.close()

    def chat(self, turns: list[Turn]) -> Turn:
        messages: list[Any] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in turns:
            message: Json = {"role": turn.who, "content": turn.text}
            if turn.calls:
                message["tool_calls"] = [
                    {"id": name, "type": "function", "function": {"name": "add", "arguments": json.dumps(given)}}
                    for name, given in turn.calls
                ]
            if turn.who == "tool":
                message["tool_call_id"] = turn.answers
            messages.append(message)
        found = self.openai.chat.completions.create(model="any", messages=messages, tools=[ADD], temperature=0)
        said = found.choices[0].message
        whole = found.choices[0].finish_reason == "tool_calls"
        calls = [(call.id, json.loads(call.function.arguments)) for call in said.tool_calls or [] if whole]
        return Turn("assistant", said.content or "", calls)

    def responses(self, turns: list[Turn]) -> Turn:
        items: list[Any] = []
        for turn in turns:
            if turn.who == "tool":
                items.append({"type": "function_call_output", "call_id": turn.answers, "output": turn.text})
            elif turn.text:
                items.append({"role": turn.who, "content": turn.text})
            for name, given in turn.calls:
                items.append({"type": "function_call", "call_id": name, "name": "add", "arguments": json.dumps(given)})
        found = self.openai.responses.create(
            model="any",
            instructions=self.system,
            input=items,
            tools=[{"type": "function", **ADD_FUNCTION}],
            temperature=0,
            store=False,
        )
        made = [item for item in found.output if item.type == "function_call" and item.status == "completed"]
        calls = [(item.call_id, json.loads(item.arguments)) for item in made]
        return Turn("assistant", found.output_text, calls)

    def messages(self, turns: list[Turn]) -> Turn:
        messages: list[Any] = []
        for turn in turns:
            blocks: list[Json] = [{"type": "text", "text": turn.text}] if turn.text else []
            blocks += [{"type": "tool_use", "id": name, "name": "add", "input": given} for name, given in turn.calls]
            if turn.who == "tool":
                blocks = [{"type": "tool_result", "tool_use_id": turn.answers, "content": turn.text}]
            messages.append({"role": "assistant" if turn.who == "assistant" else "user", "content": blocks})
        tool: Any = {"name": "add", "description": ADD_FUNCTION["description"]}
        found = self.anthropic.messages.create(
            model="any",
            max_tokens=96,
            system=self.system or "",
            messages=messages,
            tools=[{**tool, "input_schema": ADD_FUNCTION["parameters"]}],
            extra_body={"temperature": 0},
        )
        text = "".join(block.text for block in found.content if block.type == "text")
        made = [b for b in found.content if b.type == "tool_use" and found.stop_reason == "tool_use"]
        return Turn("assistant", text, [(block.id, dict(block.input)) for block in made])


Ask = Callable[[Clients, list[Turn]], Turn]
DIALECTS: dict[str, Ask] = {"chat": Clients.chat, "responses": Clients.responses, "messages": Clients.messages}
CALLS = 6


def added(given: Json) -> str:
    """The tool; a model that was told what it never learned calls it with anything."""
    return str(given["a"] + given["b"]) if given.keys() == {"a", "b"} else "?"


def converse(agency: Running, order: Sequence[str], system: str | None = None) -> tuple[str, list[Turn]]:
    """A conversation of so many calls, each in the next of the dialects; its trajectory, and what was said."""
    begun = agency.init()
    turns: list[Turn] = []
    with Clients(begun["base_url"], system) as clients:
        for at in range(CALLS):
            if not turns or turns[-1].who == "assistant":
                turns.append(Turn("user", (ONE, MORE)[len(turns) % 2]))
            answer = DIALECTS[order[at % len(order)]](clients, turns)
            turns.append(answer)
            turns += [Turn("tool", added(given), answers=name) for name, given in answer.calls]
    return begun["trajectory_uid"], turns


@pytest.mark.parametrize(
    "order",
    [("chat", "responses", "messages"), ("messages", "chat", "responses"), ("responses", "messages", "chat", "chat")],
    ids="-".join,
)
def test_dialects_that_take_turns_make_one_line_of_exact_steps(
    agency: Running, witness: Evidence, order: Sequence[str]
) -> None:
    uid, turns = converse(agency, order)
    assert [turn.text for turn in turns if turn.who == "assistant"][:4] == ["", FIVE, "", EIGHT]
    steps = agency.steps(uid)
    witness.holds(steps)
    assert tree(steps) == [None, *range(CALLS - 1)]


@pytest.mark.parametrize("system", [None, "Be exact."])
def test_the_same_conversation_has_the_same_ids_in_every_dialect(
    agency: Running, witness: Evidence, system: str | None
) -> None:
    recorded = [agency.steps(converse(agency, (dialect,), system)[0]) for dialect in DIALECTS]
    witness.holds([step for steps in recorded for step in steps])
    first, *others = [[(step.prompt_ids.tolist(), step.response_ids.tolist()) for step in steps] for steps in recorded]
    assert others == [first, first]
    # A call that breaks off is left out by clients, and what comes after it is a branch, in every dialect the same.
    line = [None, *range(CALLS - 1)] if system is None else tree(recorded[0])
    assert [tree(steps) for steps in recorded] == [line] * 3


#: Arguments that a model may well write, and whether every program could pass them on.
ODD = {
    "a number of thirty digits": ('{"a": 123456789012345678901234567890, "b": 1}', True),
    "ninety levels": ('{"a": ' + "[" * 90 + "]" * 90 + "}", True),
    "half a character": ('{"a": "\\ud83d"}', False),
    "infinity": ('{"a": 1e400}', False),
    "nine hundred levels": ('{"a": ' + "[" * 900 + "]" * 900 + "}", False),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("arguments", "called"), ODD.values(), ids=ODD)
def test_odd_arguments_are_a_call_to_make_or_one_that_breaks_off(
    rollout: Rollout, folder: Path, arguments: str, called: bool, stream: bool
) -> None:
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    rollout.reply = lambda asked: text
    user = [{"role": "user", "content": "hi"}]
    parameters = ADD_FUNCTION["parameters"]
    asked: dict[str, Json] = {
        "chat/completions": {"messages": user, "tools": [ADD]},
        "responses": {"input": "hi", "tools": [{"type": "function", **ADD_FUNCTION}]},
        "messages": {"messages": user, "max_tokens": 4096, "tools": [{"name": "add", "input_schema": parameters}]},
    }
    with in_front(rollout, folder) as gateway:
        for route, body in asked.items():
            begun = gateway.init()
            answer = gateway.post(f"{begun['base_url']}/v1/{route}", {**body, "stream": stream})
            assert answer.status_code == 200
            assert "the gateway failed" not in answer.text
            assert any(mark in answer.text for mark in ('"tool_calls":[', '"function_call"', '"tool_use"'))
            told = answer.text.replace(" ", "")
            marks = ('"finish_reason":"tool_calls"', '"stop_reason":"tool_use"', '"status":"incomplete"')
            asked_to = [mark in told for mark in marks]
            assert (any(asked_to[:2]) or (route == "responses" and not asked_to[2])) == called, answer.text
            assert len(gateway.steps(begun["trajectory_uid"])) == 1
