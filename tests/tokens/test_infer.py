"""Forms that are learned from chat templates, each style in a small template of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.tokens.models import vocabulary

from headrace.tokens.forms import Grammar, JsonObject, KeyValues, NamedArguments, Parameters, PythonCall, Reasoning
from headrace.tokens.grammars import compiled, learned
from headrace.tokens.infer import Inference, infer

TURN = "<|turn|>{{ message.role }}\n"
THOUGHT = "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"


def template(calls: str, *, thought: str = "") -> str:
    """A chat template that writes an answer's calls by `calls`."""
    body = f"{{% if message.tool_calls %}}{calls}{{% endif %}}"
    return (
        "{% if tools %}<|turn|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
        "{% for message in messages %}"
        + TURN
        + thought
        + "{{ message.content or '' }}"
        + body
        + "<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )


def each(one: str, between: str = "") -> str:
    """What is written for each call."""
    part = f"{{% if not loop.first %}}{{{{ {between!r} }}}}{{% endif %}}" if between else ""
    return "{% for call in message.tool_calls %}" + part + one + "{% endfor %}"


NAME, ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
JSON = '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}"
KEYED = "{% for key, value in call.function.arguments.items() %}"
RAW = "{{ value if value is string else value | tojson }}"
GEMMA_LIKE = (
    "{% macro show(value) %}{% if value is string %}~'{{ value }}~'{% elif value is mapping %}{{ '{' }}"
    "{% for key, inner in value.items() %}{{ key }}:{{ show(inner) }}{% if not loop.last %},{% endif %}{% endfor %}}"
    "{% elif value is sequence %}[{% for inner in value %}{{ show(inner) }}{% if not loop.last %},{% endif %}"
    "{% endfor %}]"
    "{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
)
STYLES: dict[str, tuple[str, type]] = {
    "tags": (each("\n<tool_call>\n" + JSON + "\n</tool_call>"), JsonObject),
    "list": ("<|calls|>[" + each(JSON, ", ") + "]", JsonObject),
    "list with ids": ("[CALLS][" + each(JSON[:-1] + ', "id": "{{ call.id }}"}', ", ") + "]", JsonObject),
    "the whole call": (each("<call>{{ call | tojson }}</call>"), JsonObject),
    "name as key": ("<|calls|>[" + each('{"' + NAME + '": ' + ARGUMENTS + "}", ", ") + "]<|called|>", JsonObject),
    "sorted keys": (each("<call>{{ call.function | tojson(sort_keys=true) }}</call>"), JsonObject),
    "indented": (each("<call>{{ call.function | tojson(indent=2) }}</call>\n"), JsonObject),
    "bare": (
        '{% set call = message.tool_calls[0] %}{"name": "' + NAME + '", "parameters": ' + ARGUMENTS + "}",
        JsonObject,
    ),
    "named": (each("[CALLS]" + NAME + "[ARGS]" + ARGUMENTS), NamedArguments),
    "named with id": (each("[CALLS]" + NAME + "[ID]{{ call.id }}[ARGS]" + ARGUMENTS), NamedArguments),
    "numbered": (
        "<all>" + each("<c>functions." + NAME + ":{{ loop.index0 }}<args>" + ARGUMENTS + "</c>") + "</all>",
        NamedArguments,
    ),
    "fenced": (
        "<all>" + each("<c>function<sep>" + NAME + "\n```json\n" + ARGUMENTS + "\n```</c>", "\n") + "</all>",
        NamedArguments,
    ),
    "attribute": (each("<function=" + NAME + ">" + ARGUMENTS + "</function>"), NamedArguments),
    "parameters": (
        each(
            "\n<tool_call>\n<function="
            + NAME
            + ">\n"
            + KEYED
            + "<parameter={{ key }}>\n"
            + RAW
            + "\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        ),
        Parameters,
    ),
    "pairs": (
        each(
            "\n<tool_call>"
            + NAME
            + "\n"
            + KEYED
            + "<arg_key>{{ key }}</arg_key>\n<arg_value>"
            + RAW
            + "</arg_value>\n{% endfor %}</tool_call>"
        ),
        Parameters,
    ),
    "attributes": (
        "<calls>\n"
        + each(
            '<invoke name="'
            + NAME
            + '">\n'
            + KEYED
            + '<parameter name="{{ key }}">'
            + RAW
            + "</parameter>\n{% endfor %}</invoke>\n"
        )
        + "</calls>",
        Parameters,
    ),
    "marked": (
        "<calls>\n"
        + each(
            '<invoke name="'
            + NAME
            + '">\n'
            + KEYED
            + "<parameter name=\"{{ key }}\" string=\"{{ 'true' if value is string else 'false' }}\">"
            + RAW
            + "</parameter>\n{% endfor %}</invoke>\n"
        )
        + "</calls>",
        Parameters,
    ),
    "python": (
        "<|calls|>["
        + each(
            NAME + "(" + KEYED + "{{ key }}={{ value | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})", ", "
        )
        + "]<|called|>",
        PythonCall,
    ),
    "key values": (GEMMA_LIKE + each("<call>call:" + NAME + "{{ show(call.function.arguments) }}</call>"), KeyValues),
}


def learn(text: str, tokens: tuple[str, ...] = ()) -> Inference:
    program = compiled(text)

    def write(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generate: bool) -> str:
        return str(program.render(messages=messages, tools=tools, add_generation_prompt=generate))

    return infer(write, frozenset(("<|turn|>", "<|end|>", *tokens)), text)


@pytest.mark.parametrize("style", STYLES)
def test_a_form_is_learned_from_what_a_template_writes(style: str) -> None:
    calls, body = STYLES[style]
    found = learn(template(calls, thought=THOUGHT))
    assert found.grammar.unread == ""
    assert found.found == "inferred"
    assert found.grammar.calls is not None
    assert isinstance(found.grammar.calls.body, body)
    assert found.grammar.reasoning == Reasoning()


def test_what_stands_around_calls_is_told_apart() -> None:
    form = learn(template(STYLES["fenced"][0])).grammar.calls
    assert form is not None
    assert (form.begin, form.open, form.close, form.between, form.end) == (
        "<all>",
        "<c>function<sep>",
        "\n```</c>",
        "\n",
        "</all>",
    )
    assert learn(template(STYLES["list with ids"][0])).grammar.calls == form.__class__(
        JsonObject(id="id"), begin="[CALLS][", end="]", between=", "
    )
    numbered = learn(template(STYLES["numbered"][0])).grammar.calls
    assert numbered is not None
    assert numbered.body == NamedArguments(":", "<args>", "functions.{name}:{id}")


@pytest.mark.parametrize(
    ("calls", "quirk", "value"),
    [
        ("{% set call = message.tool_calls[0] %}<call>" + JSON + "</call>", "most_calls", 1),
        (
            each('<call>{"name": "' + NAME + '", "arguments": {{ "" + call.function.arguments }}}</call>'),
            "text_arguments",
            True,
        ),
        ("{% if message.content is none %}" + each("<call>" + JSON + "</call>") + "{% endif %}", "null_content", True),
        (
            each("{% if call.id | length != 9 %}{{ raise_exception('too long') }}{% endif %}<call>" + JSON + "</call>"),
            "ids",
            "short",
        ),
    ],
)
def test_a_templates_quirks_are_found(calls: str, quirk: str, value: Any) -> None:
    found = learn(template(calls))
    assert found.grammar.calls is not None
    assert getattr(found.quirks, quirk) == value


def test_a_template_that_fails_without_tools_is_asked_with_tools() -> None:
    text = "{% for tool in tools %}{{ tool.function.name }}{% else %}{{ raise_exception('no tools') }}{% endfor %}"
    assert learn(text + template(STYLES["tags"][0])).found == "inferred"


def test_reasoning_is_read_by_the_marks_around_it() -> None:
    thought = "{% if message.thinking %}<|inner>note\n{{ message.thinking }}<inner|>{% endif %}"
    noted = learn(template(STYLES["tags"][0], thought=thought)).grammar
    assert noted.reasoning == Reasoning("<|inner>note", "<inner|>")
    assert learn(template(STYLES["tags"][0])).grammar.reasoning is None
    assert learn(template(STYLES["tags"][0]), ("<think>", "</think>")).grammar.reasoning == Reasoning()


def test_text_in_marks_of_its_own_is_content() -> None:
    said = "{% if message.content %}<|say|>{{ message.content }}<|said|>{% endif %}"
    text = template(STYLES["list"][0]).replace("{{ message.content or '' }}", said)
    grammar = learn(text).grammar
    assert (grammar.content_open, grammar.content_close) == ("<|say|>", "<|said|>")
    assert grammar.calls is not None


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ("", "writes no tool calls"),
        (each("<call>" + NAME + "</call>"), "writes no tool calls"),
        (each("<call>{{ call.function.arguments | tojson }}</call>"), "writes no tool calls"),
        (each("<call>{{ call.function }}</call>"), "could not be read back"),
        (each("<call>" + NAME + KEYED + " {{ key }} {{ value }}{% endfor %}</call>"), "could not be read back"),
    ],
)
def test_what_cannot_be_learned_is_said(calls: str, why: str) -> None:
    found = learn(template(calls))
    assert found.grammar.calls is None
    assert why in found.grammar.unread


def test_a_template_without_calls_is_read_by_what_is_declared_of_its_tokens() -> None:
    assert learn(template(""), ("<|action_start|>", "<|action_end|>", "<|plugin|>")).found == "internlm2"
    assert learn(template("") + "{# <tool_call>...</tool_call> #}").found == "hermes in the prompt"
    # What the template does write is stronger than what its tokens would allow.
    assert learn(template(STYLES["named"][0]), ("<tool_call>", "</tool_call>")).found == "inferred"


@pytest.mark.parametrize(
    ("name", "body"),
    [("qwen3", JsonObject()), ("mistral-nemo", JsonObject(id="id")), ("llama3.2", JsonObject(arguments="parameters"))],
)
def test_real_templates(name: str, body: JsonObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.tokens.grammars.cache_folder", lambda: tmp_path)
    vocab = vocabulary(name)
    found = learned(vocab, vocab.hf.chat_template, {"date_string": "26 Jul 2024"})
    assert found.grammar.calls is not None
    assert found.grammar.calls.body == body
    # What was learned once is not learned again.
    monkeypatch.setattr("headrace.tokens.grammars.infer", None)
    assert learned(vocab, vocab.hf.chat_template, {"date_string": "26 Jul 2024"}) == found
    kept = next((tmp_path / "forms").iterdir())
    kept.write_text("{}")
    with pytest.raises(TypeError):
        learned(vocab, vocab.hf.chat_template, {"date_string": "26 Jul 2024"})


def test_a_grammar_without_calls_says_why() -> None:
    assert Grammar(unread="because").markers == ()
