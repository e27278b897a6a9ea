"""Whole conversations with real chat templates, written by Hypothesis."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokens.kit import FORMATS, LOOK_UP, STOPS, Talk, as_openai, sampled, spoken
from tests.tokens.models import MODELS, renderer

from headrace.tokens import Cause, ToolCall, read_messages

ALPHABET = "ab cZ09.,:'\"{}[]<>|/\\\n\té日本🙂👩🏽\u200dß"
words = st.text(ALPHABET, max_size=24)
scalars = st.one_of(st.booleans(), st.none(), st.integers(-(2**40), 2**40), words, st.floats(-9, 9, width=16))
arguments = st.dictionaries(
    st.sampled_from(["q", "deep", "größe", "n"]), st.one_of(scalars, st.lists(scalars, max_size=3)), max_size=4
)
#: A conversation with everything that `turns` may have.
THIRTY_TURNS: list[dict[str, Any]] = [
    {
        "content": ["", "Well, 日本 🙂", "let me see"][n % 3],
        "reasoning": [None, "because\n\nof this", ""][n % 3],
        "calls": [{"q": 'naïve "x"', "deep": n % 4 == 0}, {"n": None}][: n % 3],
        "results": ["", '{"a": true}'],
        "user": ["and?", "", "größer"][n % 3],
        "cut": n % 7 == 6,
        "cuts": [n, 3 * n],
        "mangle": n % 8,
    }
    for n in range(30)
]


@st.composite
def turns(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "content": draw(words),
        "reasoning": draw(st.one_of(st.none(), words)),
        "calls": draw(st.lists(arguments, max_size=2)),
        "results": draw(st.lists(words, min_size=2, max_size=2)),
        "user": draw(words),
        "cut": draw(st.sampled_from([False, False, False, True])),
        "cuts": draw(st.lists(st.integers(0, 200), max_size=4)),
        "mangle": draw(st.integers(0, 7)),
    }


def mangled(message: dict[str, Any], how: int) -> dict[str, Any]:
    """An answer as some SDK sends it back: other keys, another order, other types, the same meaning."""
    out = copy.deepcopy(message)
    if how & 1:
        out.pop("reasoning_content", None)
    if how & 2:
        if not out["content"] and how & 1:
            out["content"] = ""
        elif not out["content"]:
            del out["content"]
        else:
            out["content"] = [{"text": out["content"], "type": "text"}]
    for call in out.get("tool_calls", ()):
        parsed = json.loads(call["function"]["arguments"])
        if how & 4:
            call["function"]["arguments"] = dict(reversed(parsed.items())) if isinstance(parsed, dict) else parsed
        elif how & 2:
            call["function"]["arguments"] = json.dumps(parsed, indent=2)
    return dict(reversed(out.items())) if how & 4 else out


def answer_of(
    name: str, number: int, turn: dict[str, Any], *, tools: bool, thinking: bool
) -> tuple[str, str | None, list[ToolCall]]:
    """What a turn says, as far as the model can say it: content, reasoning, calls."""
    form = FORMATS[name]
    made = turn["calls"][: 1 if form == "llama" else 2] if tools and form != "none" else []
    calls = [ToolCall("look_up", args, f"id{number:03}n{i:03}") for i, args in enumerate(made)]
    reasoning = turn["reasoning"] if name == "qwen3" and thinking else None
    return "" if form in ("llama", "mistral") and calls else turn["content"], reasoning, calls


def converse(name: str, plan_of_turns: list[dict[str, Any]], *, system: bool, tools: bool, thinking: bool) -> Talk:
    """Plays a conversation; every prompt is checked as it is made."""
    options = {"enable_thinking": thinking} if name == "qwen3" else None
    talk = Talk(renderer(name), [LOOK_UP] if tools else None, options)
    variant = talk.renderer.with_options(options)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if system else []
    faithful = list(messages)  # the same conversation, as the gateway gave it out
    first = {"role": "user", "content": "Hello, 世界"}
    messages, faithful = [*messages, first], [*faithful, first]
    # Where a template moves or strips something, the bridged text is not the template's, on purpose.
    comparable = True
    if name == "mistral-nemo":
        comparable = not (system or tools)
    for number, turn in enumerate(plan_of_turns):
        request, plan = talk.ask(messages)
        if number:
            assert plan.cause is Cause.EXTENDED, talk.causes
            assert plan.bridged
        if comparable:
            whole = variant.render(read_messages(faithful), request.tools)
            talk.compared += 1
            assert talk.renderer.vocabulary.decode(plan.ids) == talk.renderer.vocabulary.decode(whole)
        content, reasoning, calls = answer_of(name, number, turn, tools=tools, thinking=thinking)
        text = spoken(FORMATS[name], content, reasoning, calls)
        ids = sampled(talk.renderer, text, turn["cuts"], None if turn["cut"] and text else STOPS[name])
        parsed, _ = talk.answer(request, plan, ids)
        assert [(c.name, c.arguments) for c in parsed.tool_calls] == [(c.name, c.arguments) for c in calls]
        assert parsed.content.strip() == content.strip()
        assert (parsed.reasoning or "").strip("\n") == (reasoning or "").strip("\n")
        # Templates trim what was said, and keep reasoning only sometimes.
        comparable = comparable and reasoning is None and content == content.strip()
        answer = as_openai(parsed.message)
        follow: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": call.id, "content": result}
            for call, result in zip(parsed.tool_calls, turn["results"], strict=False)
        ] or [{"role": "user", "content": turn["user"]}]
        messages = [*messages, mangled(answer, turn["mangle"]), *follow]
        faithful = [*faithful, answer, *follow]
    return talk


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=12)
@given(st.lists(turns(), min_size=1, max_size=30), st.booleans(), st.booleans(), st.booleans())
def test_every_prompt_begins_with_the_prompt_and_response_before_it(
    name: str, script: list[dict[str, Any]], system: bool, tools: bool, thinking: bool
) -> None:
    converse(name, script, system=system, tools=tools, thinking=thinking)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_thirty_turns_with_tools_stay_one_branch(name: str, thinking: bool) -> None:
    talk = converse(name, THIRTY_TURNS, system=True, tools=True, thinking=thinking)
    assert [node.step for node in talk.history.nodes] == list(range(30))
    assert all(node.parent is before for before, node in zip(talk.history.nodes, talk.history.nodes[1:], strict=False))
    assert set(talk.causes) == {Cause.FIRST, Cause.EXTENDED}


@pytest.mark.parametrize("name", MODELS)
def test_a_bridged_prompt_says_what_the_template_would_say(name: str) -> None:
    """The bridge invents no text: where a template keeps its history, both write the same characters, turn by turn."""
    script = [
        {
            "content": ["Well, 日本 🙂", "", "x < {y}"][n % 3],
            "reasoning": None,
            "calls": [{"q": "naïve", "deep": True}, {"n": [1, None, "ß"]}][: n % 3],
            "results": ["none", "ünï"],
            "user": ["and?", "größer", "<b>"][n % 3],
            "cut": n == 4,
            "cuts": [n, 5 * n],
            "mangle": n % 8,
        }
        for n in range(12)
    ]
    # Mistral's template moves system and tools behind every new user message, so there is nothing to compare with them.
    talk = converse(name, script, system=name != "mistral-nemo", tools=name != "mistral-nemo", thinking=True)
    assert talk.compared == 12
