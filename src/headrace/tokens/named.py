"""Which chat template a tokenizer is used with: its own, one of several that it names, or one from a file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.data.errors import InvalidInput, shown
from headrace.files import expanded
from headrace.tokens.forms import Grammar
from headrace.tokens.messages import Message, ToolCall
from headrace.tokens.parse import NewId, Parsed
from headrace.tokens.renderer import AnswerStream, RendererVariants, Tools
from headrace.tokens.template import TemplateRenderer
from headrace.tokens.vocabulary import Vocabulary

#: The names by which transformers and vLLM choose where a tokenizer has several templates.
DEFAULT, TOOL_USE = "default", "tool_use"


def with_template(vocabulary: Vocabulary, asked: str | None) -> Vocabulary:
    """The tokenizer with the template that was asked for: a name that it knows, or a file; without, as it is.

    Raises InvalidInput where there is neither such a name nor such a file.
    """
    if asked is None:
        return vocabulary
    own = vocabulary.hf.chat_template
    named: Mapping[str, str] = own if isinstance(own, Mapping) else {DEFAULT: own} if own else {}
    if asked in named:
        return _changed(vocabulary, named[asked])
    file = expanded(asked)
    try:
        text = file.read_text()
    except (OSError, ValueError) as error:
        names = ", ".join(named) or "none"
        raise InvalidInput(
            f"chat_template must name a template of the tokenizer or a file that holds one, not {shown(asked)}; the "
            f"tokenizer in {vocabulary.hf.name_or_path} names: {names}; as a file: {error}"
        ) from error
    if not text.strip():
        raise InvalidInput(f"chat_template: the file {file} is empty; it must hold a Jinja chat template")
    return _changed(vocabulary, text)


def template_renderer(vocabulary: Vocabulary) -> TemplateRenderer | NamedTemplates:
    """The renderer of a tokenizer's template; of several, `default` without tools and `tool_use` with them.

    Raises InvalidInput where it has several and none of them is `default`.
    """
    own = vocabulary.hf.chat_template
    if not isinstance(own, Mapping):
        return TemplateRenderer(vocabulary)
    if DEFAULT not in own:
        raise InvalidInput(
            f"the tokenizer in {vocabulary.hf.name_or_path} has several chat templates and none is called {DEFAULT!r}; "
            f"choose one with --chat-template: {', '.join(own)}"
        )
    plain = TemplateRenderer(_changed(vocabulary, own[DEFAULT]))
    if TOOL_USE not in own:
        return plain
    return NamedTemplates(plain, TemplateRenderer(_changed(vocabulary, own[TOOL_USE])))


def _changed(vocabulary: Vocabulary, template: str) -> Vocabulary:
    hf = copy.copy(vocabulary.hf)
    hf.chat_template = template
    return Vocabulary(hf)


class NamedTemplates:
    """Two templates of one model: the one that calls without tools get, and the one for calls with tools."""

    name = "template"
    vision = TemplateRenderer.vision

    def __init__(self, plain: TemplateRenderer, tooled: TemplateRenderer) -> None:
        self.plain, self.tooled = plain, tooled
        self.vocabulary = plain.vocabulary
        self.looks_back = plain.looks_back
        self.grammar: Grammar = tooled.grammar
        self.traits = tooled.traits
        self.stop_ids = plain.stop_ids | tooled.stop_ids
        self._variants: RendererVariants[NamedTemplates] = RendererVariants()

    @property
    def overrides(self) -> frozenset[str]:
        return self.plain.overrides | self.tooled.overrides

    def with_options(self, options: Mapping[str, Any] | None) -> NamedTemplates:
        if not options:
            return self
        return self._variants.get(
            options, lambda: NamedTemplates(self.plain.with_options(options), self.tooled.with_options(options))
        )

    def has_option(self, name: str) -> bool:
        return self.plain.has_option(name) or self.tooled.has_option(name)

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        return self._for(tools).render(messages, tools)

    def bridge(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        calls: Sequence[ToolCall],
        new: Sequence[Message],
        earlier: Sequence[Message] = (),
        *,
        tools: bool = False,
    ) -> list[int] | None:
        return self._for(tools).bridge(prompt, response, calls, new, earlier, tools=tools)

    def stream(
        self,
        prompt: Sequence[int],
        *,
        tools: bool | Tools,
        new_id: NewId | None = None,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> AnswerStream:
        return self._for(tools).stream(prompt, tools=tools, new_id=new_id, stop=stop, min_tokens=min_tokens)

    def parse(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        *,
        tools: bool | Tools,
        new_id: NewId | None = None,
        stop: Sequence[str] = (),
    ) -> Parsed:
        return self._for(tools).parse(prompt, response, tools=tools, new_id=new_id, stop=stop)

    def _for(self, tools: Tools | bool) -> TemplateRenderer:
        return self.tooled if tools else self.plain
