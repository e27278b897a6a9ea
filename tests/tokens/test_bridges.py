"""Bridges by templates that do more than append: what was sampled stays, what is new is the template's."""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.data.errors import InvalidInput
from headrace.gateway.config_files import ModelSpec
from headrace.tokens import (
    Conversation,
    History,
    Message,
    ToolCall,
    Unrenderable,
    Vocabulary,
    load_renderer,
    plan_prompt,
)
from headrace.tokens.families import assumed_family
from headrace.tokens.named import NamedTemplates, with_template
from headrace.tokens.template import TemplateRenderer

TOOL = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
PROMPT = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
TURN = "<|{{m.role}}|>\n{{m.content}}{% for c in m.tool_calls or [] %}<call>{{c.function | tojson}}</call>{% endfor %}"
TURNS = "{% for m in messages %}" + TURN + "<|end|>\n{% endfor %}"

#: Small templates in the styles of real ones, what their bridges keep, and what ends an answer in them.
STYLES: dict[str, tuple[str, set[str]]] = {
    "appends": (TURNS + PROMPT, set()),
    "always asks for an answer, as Llama 3": (TURNS + "<|assistant|>\n", set()),
    "ends a text where no answer is asked for, as Phi": (
        TURNS + "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{eos_token}}{% endif %}",
        set(),
    ),
    "fails without tools, as Hermes": ("{{tools[0].function.name}}\n" + TURNS + PROMPT, set()),
    "has no end of a turn, as GLM": ("{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT, set()),
    "leaves the last answer open, as Nemotron Nano": (
        "{% for m in messages %}" + TURN + "{% if not (loop.last and m.role == 'assistant') %}{{'\\n'}}<|end|>\n"
        "{% endif %}{% endfor %}" + PROMPT,
        set(),
    ),
    "ends an answer otherwise where nothing follows, as gpt-oss": (
        "{% for m in messages %}" + TURN + "{% if loop.last and m.role == 'assistant' %}{{eos_token}}"
        "{% else %}<|end|>{% endif %}{% endfor %}" + PROMPT,
        set(),
    ),
    "takes calls without text alone, and their arguments as text, as DeepSeek V3": (
        "{% for m in messages %}<|{{m.role}}|>\n{% if m.content is none %}{% for c in m.tool_calls %}"
        "{{'<call>' + c.function.name + c.function.arguments + '</call>'}}{% endfor %}"
        "{% else %}{{m.content}}{% endif %}<|end|>\n{% endfor %}" + PROMPT,
        set(),
    ),
    "moves the system message to the last turn, as Mistral": (
        "{% for m in messages %}{% if m.role != 'system' %}{% if loop.last and messages[0].role == 'system' %}"
        "{{messages[0].content}}\n{% endif %}" + TURN + "<|end|>\n{% endif %}{% endfor %}" + PROMPT,
        {"system"},
    ),
    "moves the tools to the last turn": (
        "{% for m in messages %}{% if loop.last and tools %}{{tools | tojson}}{% endif %}"
        + TURN
        + "<|end|>\n{% endfor %}"
        + PROMPT,
        {"tools"},
    ),
    "forgets": ("{% for m in messages[-6:] %}" + TURN + "<|end|>\n{% endfor %}" + PROMPT, {"turns"}),
    "numbers turns": (
        "{% for m in messages %}{{loop.index}}." + TURN + "<|end|>\n{% endfor %}" + PROMPT,
        set(),
    ),
    "does not write calls": (
        "{% for m in messages %}<|{{m.role}}|>\n{{m.content}}<|end|>\n{% endfor %}" + PROMPT,
        set(),
    ),
}


@cache
def bytes_vocabulary() -> Vocabulary:
    """Bytes, and the markers of the templates above."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [
        "</s>",
        "<|end|>",
        *(f"<|{role}|>" for role in ("system", "user", "assistant", "tool")),
        "<call>",
        "</call>",
    ]
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    return Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


def with_style(template: str | dict[str, str] | None) -> Vocabulary:
    hf = copy.copy(bytes_vocabulary().hf)
    hf.chat_template = template
    return Vocabulary(hf)


def sampled_end(render: TemplateRenderer, calls: tuple[ToolCall, ...], new: Message) -> str:
    """The token with which a model of this template ends its turn."""
    if render.traits.openers:
        return f"<|{new.role}|>"
    return (render.traits.call_stops or (render.traits.stop,))[0] if calls else render.traits.stop


def turns() -> list[tuple[str, tuple[ToolCall, ...], Message]]:
    """Five answers: what they say, the calls in them, and the message that follows."""
    calls = [ToolCall("f", {"q": f"日本 {n}"}, f"abcdef12{n}") for n in range(2)]
    return [
        ("Hi 🙂", (), Message("user", "Use it.\n")),
        ('<call>{"name": "f"}</call>', calls[:1], Message("tool", "42", None, (), calls[0].id, "f")),
        ("So.", (), Message("user", "Again, <b>please</b>")),
        ('<call>{"name": "f"}</call>', calls[1:], Message("tool", "", None, (), calls[1].id, "f")),
        ("Done.", (), Message("user", "thanks")),
    ]  # type: ignore[return-value]


@pytest.mark.parametrize("style", STYLES)
def test_every_turn_is_bridged_and_says_what_the_template_writes(style: str) -> None:
    template, overrides = STYLES[style]
    render = TemplateRenderer(with_style(template))
    assert (render.traits.refused, render.overrides) == ({}, overrides)
    history, encode = History(), render.vocabulary.encode
    messages = [Message("system", "Be brief."), Message("user", "Hello?")]
    tools = [TOOL] if render.traits.needs_tools or "tools" in template else []
    written = ""
    for said, calls, new in turns():
        conversation = Conversation(tuple(messages), tools, None)
        plan = plan_prompt(render, history, conversation)
        if history.nodes:
            assert (plan.cause, plan.bridged) == ("extended", True)
            before = history.nodes[-1].whole().tolist()
            assert plan.ids.tolist()[: len(before)] == before
            fresh = render.text(
                [m for m in messages if m.role != "system" or "system" not in overrides],
                () if "tools" in overrides else tools,
            )
            assert fresh.endswith(render.vocabulary.decode(plan.ids.tolist()[len(before) :]).lstrip()), "the template's"
        answer = Message("assistant", "" if calls else said, None, tuple(calls))
        response = encode(said + sampled_end(render, tuple(calls), new))
        record = history.record(conversation, answer, plan.parent)
        history.add(record, plan.ids, np.array(response), plan.parent)
        messages += [answer, new]
    plan = plan_prompt(render, history, Conversation(tuple(messages), tools, None))
    written = render.vocabulary.decode(plan.ids.tolist())
    assert plan.bridged
    for said, _, new in turns():
        assert said in written
        assert new.content in written
    assert written.count("Be brief.") == 1
    assert not re.search(r"headrace", written), "nothing of a stand-in"


def test_an_answer_that_was_cut_is_closed_as_the_template_closes_it() -> None:
    for style, closed in (
        ("appends", "<|end|>\n<|user|>\nmore<|end|>\n<|assistant|>\n"),
        ("has no end of a turn, as GLM", "<|user|>\nmore<|assistant|>\n"),
        ("leaves the last answer open, as Nemotron Nano", "\n<|end|>\n<|user|>\nmore\n<|end|>\n<|assistant|>\n"),
    ):
        render = TemplateRenderer(with_style(STYLES[style][0]))
        ids = render.bridge(
            render.render([Message("user", "x")]), render.vocabulary.encode("so"), (), [Message("user", "more")]
        )
        assert render.vocabulary.decode(ids or ()) == closed


def test_the_next_turns_token_is_written_once() -> None:
    render = TemplateRenderer(with_style(STYLES["has no end of a turn, as GLM"][0]))
    assert {render.vocabulary.added[i] for i in render.stop_ids} == {"</s>", "<|user|>", "<|tool|>"}
    new = [Message("user", "more")]
    rest = {end: render.bridge([1], render.vocabulary.encode("so" + end), (), new) for end in ("<|user|>", "</s>")}
    texts = {end: render.vocabulary.decode(ids or ()) for end, ids in rest.items()}
    assert texts == {"<|user|>": "\nmore<|assistant|>\n", "</s>": "<|user|>\nmore<|assistant|>\n"}


def test_of_several_templates_the_one_for_tools_is_taken_with_tools() -> None:
    named = with_style({"default": TURNS + PROMPT, "tool_use": "{{tools[0].function.name}}\n" + TURNS + PROMPT})
    render = load_renderer(named, "template")
    assert isinstance(render, NamedTemplates)
    question = [Message("user", "one")]
    assert render.vocabulary.decode(render.render(question)) == "<|user|>\none<|end|>\n<|assistant|>\n"
    assert render.vocabulary.decode(render.render(question, [TOOL])).startswith("f\n<|user|>")
    said = render.vocabulary.encode("so<|end|>")
    for tools in (False, True):
        ids = render.bridge([1], said, (), question, question, tools=tools)
        assert render.vocabulary.decode(ids or ()) == "\n<|user|>\none<|end|>\n<|assistant|>\n"


def test_a_template_is_chosen_by_name_or_file(tmp_path: Path) -> None:
    named = with_style({"rag": "{{'r'}}" + TURNS, "tool_use": TURNS})
    with pytest.raises(InvalidInput, match=r"several chat templates and none is called 'default'; .*: rag, tool_use"):
        load_renderer(named, "template")
    with pytest.raises(InvalidInput, match=r"not 'ragg'; .* names: rag, tool_use"):
        load_renderer(named, "template", "ragg")
    assert named.decode(load_renderer(named, "template", "rag").render([Message("user", "x")])).startswith("r<|user|>")
    file = tmp_path / "mine.jinja"
    file.write_text("mine" + TURNS)
    assert with_template(with_style(None), str(file)).hf.chat_template == "mine" + TURNS
    file.write_text(" ")
    with pytest.raises(InvalidInput, match="is empty"):
        with_template(named, str(file))


def test_without_a_template_the_error_says_what_to_give() -> None:
    with pytest.raises(Unrenderable, match=r"no chat template; give one .*--chat-template FILE.*--renderer: .*qwen3"):
        load_renderer(with_style(None))
    assert assumed_family(with_style(None)) is None


def test_a_family_is_assumed_by_tokens_that_no_other_has() -> None:
    class Tokens:
        def __init__(self, *tokens: str) -> None:
            self.added = dict(enumerate(tokens))

        def id_of(self, token: str) -> int | None:
            return next((i for i, known in self.added.items() if known == token), None)

    v4: Any = Tokens("<｜User｜>", "｜DSML｜", "<｜begin▁sys｜>", "<｜action｜>", "<think>")
    v3: Any = Tokens("<｜User｜>", "<think>", "<｜tool▁calls▁begin｜>")
    assert (assumed_family(v4), assumed_family(v3)) == ("deepseek-v4", None)


def test_the_settings_hand_a_template_on() -> None:
    spec = json.dumps({"tokenizer": "/m", "chat_template": "rag"})
    assert msgspec.json.decode(spec, type=ModelSpec).chat_template == "rag"
