"""Random conversations with every family: each prompt continues the last, calls are read as they were written."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.models import corpus, page

from headrace.checkup.model import ONE, ScriptedTalk, whole_as_delta
from headrace.checkup.scripted import TemplateSpeaker
from headrace.tokens import Cause, Message, Renderer, ToolCall, Unrenderable

PROPERTIES: dict[str, Any] = {
    "q": {"type": "string", "description": "text"},
    "n": {"type": "integer", "description": "a count"},
    "share": {"type": "number", "description": "a share"},
    "deep": {"type": "boolean", "description": "whether"},
    "items": {"type": "array", "items": {"type": "string"}, "description": "some"},
    "about": {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}, "description": "more"},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": []},
        },
    }
    for name in ("look_up", "send-mail")
]
QUOTES = re.compile(r"['\"\\]")
LETTERS = "abcXYZ 0159.,;:!?'\"\\/(){}=-_#*\n\tüéß日本語🙂\u200d"

texts = st.text(LETTERS, min_size=1, max_size=40).map(lambda text: " ".join(text.split(" ")).strip()).filter(bool)
words = texts.map(lambda text: f"w {text} w")
plain = st.one_of(texts, st.integers(-(10**6), 10**6), st.booleans(), st.none(), st.just(2.5))
values = {
    "q": st.one_of(texts, st.just("")),
    "n": st.integers(-(10**6), 10**6),
    "share": st.sampled_from([0.5, -2.25, 1e-3]),
    "deep": st.booleans(),
    "items": st.lists(plain, max_size=3),
    "about": st.dictionaries(st.sampled_from(["x", "ü", "a b"]), plain, max_size=2),
}
calls = st.builds(ToolCall, st.sampled_from(["look_up", "send-mail"]), st.fixed_dictionaries({}, optional=values))
answers = st.builds(
    lambda content, reasoning, made: Message("assistant", content if not made else "", reasoning, tuple(made)),
    words,
    st.one_of(st.none(), words),
    st.lists(calls, max_size=2),
)
turns = st.lists(st.tuples(words, answers, st.lists(texts, min_size=2, max_size=2)), min_size=2, max_size=4)


#: Without shrinking: it would take minutes, and a conversation that fails is short already.
PHASES = (Phase.explicit, Phase.generate)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=PHASES,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
@given(script=turns, system=st.one_of(st.none(), words), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_a_conversation(renderer: Renderer, name: str, script: list[Any], system: str | None, cuts: list[int]) -> None:
    scripted = TemplateSpeaker(renderer)
    talk = ScriptedTalk(scripted, TOOLS if scripted.writes_calls(TOOLS, ONE[0]) else [])
    if system is not None:
        talk.messages = [Message("system", system)]
    for question, answer, results in script:
        if corpus.FAMILIES[name].unescaped:
            answer = _without_quotes(answer)
        answer = _numbered(answer, talk) if talk.tools else Message("assistant", answer.content or "Well.")
        new = _results(talk, results) or [Message("user", question)]
        try:
            done = talk.turn(new, answer, sorted(set(cuts)))
        except Unrenderable:
            return  # the template's own limit: no system message, no second call
        meant = done.sampled.answer
        assert done.plan.cause in (Cause.FIRST, Cause.EXTENDED)
        assert [(c.name, c.arguments) for c in done.whole.tool_calls] == [
            (c.name, c.arguments) for c in meant.tool_calls
        ]
        assert done.whole.content.strip() == meant.content
        assert (done.whole.reasoning or "").strip() == (meant.reasoning or "")
        assert done.streamed == whole_as_delta(done.whole)
        assert not done.quarantine
    assert talk.unnamed == []
    assert talk.kept <= page.kept_by(name)


def _without_quotes(answer: Message) -> Message:
    made = []
    for call in answer.tool_calls:
        given = {
            key: QUOTES.sub("", value) if isinstance(value, str) else value for key, value in call.arguments.items()
        }
        made.append(ToolCall(call.name, given))
    return Message("assistant", answer.content, answer.reasoning, tuple(made))


def _numbered(answer: Message, talk: ScriptedTalk) -> Message:
    made = tuple(
        ToolCall(call.name, call.arguments, f"id{talk.turns:03d}x{n:03d}") for n, call in enumerate(answer.tool_calls)
    )
    return Message("assistant", answer.content, answer.reasoning, made)


def _results(talk: ScriptedTalk, texts: list[str]) -> list[Message]:
    asked = talk.messages[-1].tool_calls if talk.messages else ()
    return [Message("tool", text, None, (), call.id, call.name) for call, text in zip(asked, texts, strict=False)]
