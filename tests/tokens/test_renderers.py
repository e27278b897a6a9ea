"""Which renderer a model gets, what its bridge is allowed to do, and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokens.kit import LOOK_UP, STOPS
from tests.tokens.models import MODELS, folder, renderer, vocabulary

from headrace.data.errors import InvalidInput
from headrace.tokens import Message, ToolCall, Unrenderable, Vocabulary, families, load_renderer
from headrace.tokens.families import FamilyRenderer
from headrace.tokens.renderer import MAX_VARIANTS, PROMPT_TAIL_TOKENS, RendererVariants
from headrace.tokens.template import TemplateRenderer, short_id

KINDS = {"answer>user", "calls>tool"}
USER = Message("user", "one")


def with_template(template: str, name: str = "qwen2.5") -> TemplateRenderer:
    """A real tokenizer with another chat template."""
    import copy

    hf = copy.copy(vocabulary(name).hf)
    hf.chat_template = template
    return TemplateRenderer(Vocabulary(hf))


@pytest.mark.parametrize(
    ("name", "family", "overrides"),
    [
        ("qwen3", "qwen3", {"reasoning"}),
        ("llama3.2", "llama-3", set()),
        ("qwen2.5", "template", set()),
        ("mistral-nemo", "template", {"system", "tools"}),
        ("smollm2", "template", set()),
    ],
)
def test_a_model_gets_the_family_that_is_proven_to_write_its_template(
    name: str, family: str, overrides: set[str]
) -> None:
    assert renderer(name).name == family
    assert renderer(name).overrides == overrides


def test_that_no_family_writes_a_template_is_found_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert load_renderer(vocabulary("smollm2")).name == "template"
    asked: list[Vocabulary] = []

    def candidates(given: Vocabulary) -> list[str]:
        asked.append(given)
        return ["qwen3"]

    monkeypatch.setattr(families, "_candidates", candidates)
    assert load_renderer(vocabulary("smollm2")).name == "template"
    assert asked == []
    assert load_renderer(vocabulary("qwen3")).name == "qwen3"
    assert asked == [vocabulary("qwen3")], "another tokenizer is another question"


def test_a_family_that_could_not_be_tried_is_not_ruled_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    with monkeypatch.context() as broken:
        broken.setattr(families, "FamilyRenderer", _unreachable)
        assert load_renderer(vocabulary("qwen3")).name == "template"
    assert load_renderer(vocabulary("qwen3")).name == "qwen3"


def _unreachable(*_: Any, **__: Any) -> None:
    raise ConnectionError("a file that it needs is not here")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("qwen3", KINDS | {"calls>tool+user", "calls>user", "answer>system+user", "calls>system+user", "answer>tool"}),
        (
            "qwen2.5",
            KINDS | {"calls>tool+user", "calls>user", "answer>system+user", "calls>system+user", "answer>tool"},
        ),
        (
            "llama3.2",
            KINDS | {"calls>tool+user", "calls>user", "answer>system+user", "calls>system+user", "answer>tool"},
        ),
        ("mistral-nemo", KINDS | {"answer>tool"}),
        (
            "smollm2",
            KINDS | {"calls>tool+user", "calls>user", "answer>system+user", "calls>system+user", "answer>tool"},
        ),
    ],
)
def test_the_probe_allows_the_kinds_of_turn_that_a_template_only_appends(name: str, kinds: set[str]) -> None:
    template: Any = renderer(name, "template")
    assert template.traits.bridged == kinds
    assert template.traits.stop == STOPS[name]
    assert template.traits.short_ids == (name == "mistral-nemo")


CHATML = "{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}"
PROMPT = "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{% for m in messages %}" + CHATML + "{% endfor %}"
            "{{(messages | selectattr('role', 'eq', 'assistant') | list | last).content | length}}" + PROMPT,
            "depends on the turns before",
        ),
        ("{% for m in messages if m['role'] != 'assistant' %}" + CHATML + "{% endfor %}", "does not write answers"),
        ("{% for m in messages %}{{raise_exception('no ' + m['role'])}}{% endfor %}", "does not write answers"),
    ],
)
def test_a_template_of_which_nothing_can_be_told_is_not_bridged(template: str, why: str) -> None:
    render = with_template(template)
    assert "answer>user" not in render.traits.bridged
    assert any(why in reason for reason in render.traits.refused.values()), render.traits.refused
    assert render.bridge([1], render.vocabulary.encode("so<|im_end|>"), (), [USER], [USER]) is None


def test_a_template_that_only_appends_is_bridged() -> None:
    render = with_template("{% for m in messages %}" + CHATML + "{% endfor %}" + PROMPT)
    ids = render.bridge(render.render([USER]), render.vocabulary.encode("so<|im_end|>"), (), [USER])
    assert render.vocabulary.decode(ids or ()) == "\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", MODELS)
def test_what_the_model_left_unclosed_is_closed_first(name: str) -> None:
    render = renderer(name)
    prompt, said = render.render([USER]), render.vocabulary.encode("so")
    stop = render.vocabulary.id_of(STOPS[name])
    closed = render.bridge(prompt, [*said, stop], (), [USER])  # type: ignore[list-item]
    assert render.bridge(prompt, said, (), [USER]) == [stop, *(closed or ())]


def test_reasoning_that_was_cut_off_is_closed_first() -> None:
    for family in ("auto", "template"):
        render = renderer("qwen3", family)
        ids = render.bridge(render.render([USER]), render.vocabulary.encode("<think>\nwhy"), (), [USER])
        assert render.vocabulary.decode(ids or ()).startswith("</think><|im_end|>\n<|im_start|>user\none")


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_among_the_new_messages_is_never_bridged(name: str) -> None:
    render = renderer(name)
    said = render.vocabulary.encode("so" + STOPS[name])
    assert render.bridge(render.render([USER]), said, (), [Message("assistant", "x"), USER]) is None
    assert render.bridge(render.render([USER]), said, (), []) is None


@pytest.mark.parametrize("name", ["qwen3", "llama3.2"])
def test_the_librarys_bridge_and_ours_write_the_same_ids(name: str) -> None:
    library, template = renderer(name), renderer(name, "template")
    prompt = library.render([Message("system", "Be brief."), USER], [LOOK_UP])
    said = library.vocabulary.encode("so" + STOPS[name])
    call = ToolCall("look_up", {}, "abcdef123")
    result = Message("tool", "42 é", None, (), "abcdef123")
    for calls, new in (((), [USER]), ((), [Message("user", " 日本\n")]), ((call,), [result])):
        assert library.bridge(prompt, said, calls, new) == template.bridge(prompt, said, calls, new)


@pytest.mark.parametrize("name", ["qwen3", "llama3.2"])
@settings(max_examples=40)
@given(
    st.lists(st.text("ab 日🙂<>\n", max_size=12), min_size=2, max_size=8),
    st.sampled_from(["", "<think>\n", "<think>a</think>"]),
    st.booleans(),
    st.booleans(),
)
def test_the_last_ids_of_a_prompt_are_enough_for_the_librarys_bridge(
    name: str, texts: list[str], thought: str, thinking: bool, closed: bool
) -> None:
    short: Any = renderer(name)
    whole = FamilyRenderer(short.name, short.vocabulary)
    if name == "qwen3":
        short, whole = (render.with_options({"enable_thinking": thinking}) for render in (short, whole))
    assert (short.looks_back, whole.looks_back) == (PROMPT_TAIL_TOKENS, None)
    roles = ("user", "assistant")
    history = [Message(roles[i % 2], text) for i, text in enumerate(texts[: len(texts) // 2 * 2 - 1])]
    prompt = whole.render(history)
    response = short.vocabulary.encode(thought + texts[0] + (STOPS[name] if closed else ""))
    new = [Message("user", texts[-1])]
    assert short.bridge(prompt, response, (), new) == whole.bridge(prompt, response, (), new)


def test_a_family_is_taken_by_name_on_trust() -> None:
    taken = load_renderer(vocabulary("qwen3"), "qwen3")
    assert (taken.name, taken.looks_back) == ("qwen3", PROMPT_TAIL_TOKENS)
    with pytest.raises(InvalidInput, match=r"unknown model family 'qwen9'; known: .*qwen3"):
        load_renderer(vocabulary("qwen3"), "qwen9")


def test_options_that_a_family_does_not_have_are_named() -> None:
    with pytest.raises(InvalidInput, match="qwen3 has no template option 'thinking'; it has: enable_thinking"):
        renderer("qwen3").with_options({"thinking": True})


def test_thinking_off_is_written_into_the_prompt() -> None:
    for family in ("auto", "template"):
        render = renderer("qwen3", family).with_options({"enable_thinking": False})
        assert render.vocabulary.decode(render.render([USER])).endswith("<think>\n\n</think>\n\n")


def test_messages_that_a_template_refuses_are_refused_in_its_words() -> None:
    with pytest.raises(Unrenderable, match="roles must alternate"):
        renderer("mistral-nemo").render([USER, USER])
    two = (ToolCall("f", {}, "a"), ToolCall("g", {}, "b"))
    with pytest.raises(Unrenderable, match="single tool call"):
        renderer("llama3.2").render([USER, Message("assistant", "", None, two), USER])


def test_mistral_gets_ids_of_nine_letters_whatever_a_client_calls_them() -> None:
    assert short_id("abc123DEF") == "abc123DEF"
    assert len(short_id("call_0123456789")) == 9
    assert short_id("call_1") != short_id("call_2")
    render = renderer("mistral-nemo")
    call = ToolCall("look_up", {}, "call_0123456789")
    asked = [USER, Message("assistant", "", None, (call,)), Message("tool", "1", None, (), call.id)]
    assert render.vocabulary.decode(render.render(asked)).count(short_id(call.id)) == 2


def test_a_tokenizer_without_a_template_or_a_folder_without_a_tokenizer_is_named(tmp_path: Any) -> None:
    with pytest.raises(InvalidInput, match="no tokenizer could be loaded"):
        load_renderer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder("smollm2") / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(InvalidInput, match="no chat template"):
        load_renderer(tmp_path)


def test_the_same_options_are_the_same_renderer_in_any_order() -> None:
    variants: RendererVariants[object] = RendererVariants()
    assert variants.get({"a": 1, "b": 2}, object) is variants.get({"b": 2, "a": 1}, object)


def test_however_many_options_agents_think_of_the_renderers_used_last_are_kept() -> None:
    variants: RendererVariants[object] = RendererVariants()
    first = variants.get({"n": 0}, object)
    for n in range(1, 3 * MAX_VARIANTS):
        variants.get({"n": n}, object)
        assert variants.get({"n": 0}, object) is first
        assert len(variants) <= MAX_VARIANTS
    assert variants.get({"n": 3 * MAX_VARIANTS - 1}, list) != []
    assert variants.get({"n": 1}, list) == []
