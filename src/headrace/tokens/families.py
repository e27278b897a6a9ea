"""Which renderer a model gets: a family of the `renderers` library, found by proof and not by name, or its template.

A folder's name says little about the template in it. So a family is taken for a model only if the library writes the
same ids as the model's own template, over conversations with every kind of turn.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace.data.errors import InvalidInput
from headrace.extras import require
from headrace.files import cache_folder
from headrace.tokens.forms import Grammar
from headrace.tokens.grammars import learned
from headrace.tokens.harmony import HARMONY_FAMILY, own_harmony_vocabulary
from headrace.tokens.messages import Message, ToolCall, Unrenderable, read_arguments, to_dict
from headrace.tokens.named import NamedTemplates, template_renderer, with_template
from headrace.tokens.parse import AnswerDelta, CallDelta, NewId, Parsed, is_portable_json
from headrace.tokens.probe import proofs
from headrace.tokens.renderer import (
    PROMPT_TAIL_TOKENS,
    AnswerStream,
    GrammarParsing,
    Renderer,
    RendererVariants,
    Tools,
    default_call_id,
)
from headrace.tokens.stops import StopCut
from headrace.tokens.template import PINNED_OPTIONS, TemplateRenderer
from headrace.tokens.vision import PROCESSOR_CONFIG, Vision
from headrace.tokens.vocabulary import Vocabulary, load_vocabulary

log = logging.getLogger("headrace.tokens")

#: The placeholder token of the families that write images as one kind of it.
IMAGE_PLACEHOLDERS = {family: "<|image_pad|>" for family in ("qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8")}
#: The template option under which a number is written before each image.
IMAGE_NUMBERS_OPTION = "add_vision_id"
#: A token without which a family need not be tried: building it would look for files on the network.
REQUIRED_TOKENS = {"gpt-oss": "<|channel|>"}
#: Special tokens that tell a family without a template: models of these come with code in place of one.
TELLING_TOKENS = {
    "deepseek-v4": ("｜DSML｜", "<｜begin▁sys｜>", "<｜action｜>", "<think>"),
    "gpt-oss": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>"),
}


def load_renderer(source: str | Path | Vocabulary, family: str = "auto", chat_template: str | None = None) -> Renderer:
    """The renderer for the tokenizer in a folder.

    `auto` takes the family of `renderers` that is proven to write what the model's template writes, and the template
    itself where none is; `template` takes the template; anything else is the name of a family, taken on trust.
    `chat_template` is the name of one of the tokenizer's templates, or a file to take instead. A tokenizer without any
    is of the family that its special tokens tell, where they do; else InvalidInput says what to give. Raises
    MissingExtra where a family is looked for and the library that has them is not installed.
    """
    vocabulary = with_template(source if isinstance(source, Vocabulary) else load_vocabulary(source), chat_template)
    if family not in ("auto", "template"):
        return named_family(family, vocabulary)
    if not vocabulary.hf.chat_template:
        assumed = assumed_family(vocabulary) if family == "auto" else None
        if assumed is None:
            raise Unrenderable(
                f"the tokenizer in {vocabulary.hf.name_or_path} has no chat template; give one as a file with "
                f"--chat-template FILE, or name the model's family with --renderer: {', '.join(families())}"
            )
        log.warning(
            "%s has no chat template: its family is assumed to be %s, by its special tokens; --renderer names another",
            *(vocabulary.hf.name_or_path, assumed),
        )
        return named_family(assumed, vocabulary)
    template = template_renderer(vocabulary)
    if family == "template":
        return template
    require("tokens")  # whose libraries have the families; a template alone needs none of them
    return proven_family(template) or template


def assumed_family(vocabulary: Vocabulary) -> str | None:
    """The family of a tokenizer without a template, by special tokens of its own; None where they do not tell."""
    for family, tokens in TELLING_TOKENS.items():
        if all(vocabulary.id_of(token) in vocabulary.added for token in tokens):
            return family
    return None


class FamilyRenderer(GrammarParsing):
    """One family of `renderers`. Earlier reasoning stays in context, since it was sampled there.

    The library walks the whole prompt to bridge. The last few ids tell it the same; `looks_back` is how many of them it
    gets, and None gives it all, for a family in which that made a difference when it was tried.
    """

    def __init__(
        self,
        family: str,
        vocabulary: Vocabulary,
        options: Mapping[str, Any] | None = None,
        *,
        looks_back: int | None = None,
        grammar: Grammar | None = None,
        bridging: TemplateRenderer | None = None,
    ) -> None:
        """`bridging` is the model's template, where the library would append other ids than that writes."""
        self.name = family
        self._bridging = bridging
        self.vocabulary = vocabulary
        self.options = dict(options or {})
        self.looks_back = looks_back
        self._library = _create(family, vocabulary, self.options)
        self.stop_ids = frozenset(int(i) for i in self._library.get_stop_token_ids())
        self.grammar = grammar or _grammar(vocabulary)
        self.vision = _vision(family, vocabulary)
        self._variants: RendererVariants[FamilyRenderer] = RendererVariants()

    @property
    def overrides(self) -> frozenset[str]:
        kept = frozenset() if self._library.is_prefix_stable else frozenset({"reasoning"})
        return kept if self._bridging is None else kept | self._bridging.overrides

    def with_options(self, options: Mapping[str, Any] | None) -> FamilyRenderer:
        if not options:
            return self
        template = self._bridging and self._bridging.with_options(options)
        return self._variants.get(
            options,
            lambda: FamilyRenderer(
                self.name,
                self.vocabulary,
                options,
                looks_back=self.looks_back,
                grammar=self.grammar,
                bridging=template,
            ),
        )

    def has_option(self, name: str) -> bool:
        return name in _option_names(self.name)

    def render(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        given = [to_dict(message) for message in messages]
        specs = [dict(tool) for tool in tools] or None
        try:
            return [int(i) for i in self._written(given, specs)]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Unrenderable(f"the model's chat format cannot hold these messages: {error}") from error

    def _written(self, messages: list[Any], tools: list[Any] | None) -> Sequence[int]:
        if self.name not in IMAGE_PLACEHOLDERS:
            ids: Sequence[int] = self._library.render_ids(messages, tools=tools, add_generation_prompt=True)
            return ids
        # The library would read the images' files and unfold them; here `vision` does that.
        given = {"tools": tools, "add_generation_prompt": True, "process_multimodal": False}
        written: Sequence[int] = self._library.render(messages, **given).token_ids
        return written

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
        if not new or any(message.role == "assistant" for message in new):
            return None
        if self._bridging is not None and not any(message.parts for message in new):
            return self._bridging.bridge(prompt, response, calls, new, earlier, tools=tools)
        if self.options.get(IMAGE_NUMBERS_OPTION) and any(message.parts for message in new):
            return None  # how many images came before cannot be told from the last few ids
        before = [int(i) for i in (prompt if self.looks_back is None else prompt[-self.looks_back :])]
        sampled = [int(i) for i in response]
        names = {call.id: call.name for call in calls if call.id}
        given = []
        for message in new:
            item = to_dict(message)
            # The call that a result answers is not among the new messages, and some formats write its name.
            if message.role == "tool" and message.name is None and message.tool_call_id in names:
                item["name"] = names[message.tool_call_id]
            given.append(item)
        try:
            if self.name in IMAGE_PLACEHOLDERS:
                bridged = self._library.bridge_to_next_turn(before, sampled, given, process_multimodal=False)
            else:
                bridged = self._library.bridge_to_next_turn(before, sampled, given)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        if bridged is None:
            return self._after_several(sampled, calls, given)
        ids, kept = bridged.token_ids, len(before) + len(sampled)
        if len(ids) <= kept or ids[:kept] != before + sampled:
            return None
        return [int(i) for i in ids[kept:]]

    def _after_several(
        self, response: list[int], calls: Sequence[ToolCall], new: list[dict[str, Any]]
    ) -> list[int] | None:
        """What follows several calls, for a family that sorts their results by the calls, which its library's bridge is
        not told: what the library writes after a stand-in that made them."""
        if len(calls) < 2 or not response:
            return None
        made = tuple(ToolCall(call.name, {}, call.id) for call in calls)
        before = [to_dict(Message("user", "question")), to_dict(Message("assistant", "", None, made))]
        try:
            own = self._library.render_ids(before, add_generation_prompt=False)
            whole = self._library.render_ids([*before, *new], add_generation_prompt=True)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        if response[-1] not in self.stop_ids or response[-1] != own[-1] or whole[: len(own)] != own:
            return None
        return [int(i) for i in whole[len(own) :]]

    def stream(
        self,
        prompt: Sequence[int],
        *,
        tools: bool | Tools,
        new_id: NewId | None = None,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> AnswerStream:
        if self.grammar.calls is not None:
            return super().stream(prompt, tools=tools, new_id=new_id, stop=stop, min_tokens=min_tokens)
        return LibraryStream(
            self._library,
            self.vocabulary,
            prompt,
            tools=bool(tools),
            new_id=new_id or default_call_id,
            stop=stop if not min_tokens else (),  # which text the first tokens are, the library does not tell
        )


class LibraryStream:
    """An answer that the library parses, once it is whole."""

    def __init__(
        self,
        library: Any,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        *,
        tools: bool,
        new_id: NewId,
        stop: Sequence[str],
    ) -> None:
        self._library = library
        self._vocabulary = vocabulary
        self._prompt = [int(i) for i in prompt[-PROMPT_TAIL_TOKENS:]]
        self._tools = tools
        self._new_id = new_id
        self._stop = stop
        self._ids: list[int] = []
        self._parsed = Parsed()

    def feed(self, ids: Sequence[int]) -> AnswerDelta:
        self._ids.extend(int(i) for i in ids)
        return AnswerDelta()

    def feed_parts(self, ids: Sequence[int]) -> list[AnswerDelta]:
        return [self.feed(ids)]

    def finish(self) -> AnswerDelta:
        found = self._library.parse_response(self._ids, prompt_ids=self._prompt)
        content = str(found.content or "")
        made: list[ToolCall] = []
        malformed: list[str] = []
        for call in found.tool_calls:
            arguments = read_arguments(call.arguments)
            if self._tools and call.name and str(call.status) == "ok" and is_portable_json(arguments):
                made.append(ToolCall(call.name, arguments, call.id or self._new_id(len(made))))
            else:
                malformed.append(call.raw)
                content += call.raw
        cut = StopCut(self._stop)
        content = cut.feed(content) + cut.finish()
        open_end = found.reasoning_complete is False
        self._parsed = Parsed(
            content, found.reasoning_content, tuple(made), tuple(malformed), "reasoning" if open_end else ""
        )
        calls = (CallDelta(n, call.id, call.name, call.arguments_text) for n, call in enumerate(made))
        return AnswerDelta(content, found.reasoning_content or "", tuple(calls))

    @property
    def parsed(self) -> Parsed:
        return self._parsed


def families() -> list[str]:
    """The families that may be asked for by name."""
    from renderers import base

    base._populate_registry()
    return [name for name in base.RENDERER_REGISTRY if name != "default"]


def _grammar(vocabulary: Vocabulary) -> Grammar:
    template = vocabulary.hf.chat_template
    return learned(vocabulary, template if isinstance(template, str) else "", PINNED_OPTIONS).grammar


def _vision(family: str, vocabulary: Vocabulary) -> Vision | str:
    token = IMAGE_PLACEHOLDERS.get(family)
    placeholder = vocabulary.id_of(token) if token is not None else None
    if placeholder is None:
        return f"it is rendered as {family}, which is text only here"
    return Vision.of(vocabulary.folder, placeholder)


@cache
def _option_names(family: str) -> frozenset[str]:
    """The template options that a family knows."""
    from renderers import config_from_name

    return frozenset(type(config_from_name(family)).template_field_names())


def _create(family: str, vocabulary: Vocabulary, options: Mapping[str, Any]) -> Any:
    from pydantic import ValidationError
    from renderers import config_from_name, create_renderer

    if family not in families():
        raise InvalidInput(f"unknown model family {family!r}; known: {', '.join(families())}")
    config_type = type(config_from_name(family))
    known = _option_names(family)
    unknown = sorted(set(options) - known)
    if unknown:
        raise InvalidInput(
            f"{family} has no template option {unknown[0]!r}; it has: {', '.join(sorted(known)) or 'none'}"
        )
    try:
        config = config_type(thinking_retention="all", **options)
    except ValidationError as error:
        raise InvalidInput(
            f"template options {dict(options)} do not fit {family}: {error.errors()[0]['msg']}"
        ) from None
    with own_harmony_vocabulary(vocabulary) if family == HARMONY_FAMILY else nullcontext():
        return create_renderer(CachingTokenizer(vocabulary), config)


def proven_family(template: TemplateRenderer | NamedTemplates) -> FamilyRenderer | None:
    """The family that writes the same ids as the model's own template; None where there is none, which is kept in the
    user's cache: the next to ask need not import the library, which takes longer than all else at a start."""
    disproven = cache_folder() / "no-family" / _proof_key(template)
    if disproven.exists():
        return None
    certain = True
    for family in _candidates(template.vocabulary):
        if family in REQUIRED_TOKENS and template.vocabulary.id_of(REQUIRED_TOKENS[family]) is None:
            continue
        try:
            renderer = FamilyRenderer(family, template.vocabulary, grammar=template.grammar)
        except Exception as error:  # each family says in its own way that its tokens are not in this vocabulary
            certain = certain and not isinstance(error, OSError | ImportError | MemoryError)
            continue
        if _same_ids(renderer, template):
            bridging = None
            if isinstance(template, TemplateRenderer) and not _same_bridges(renderer, template):
                bridging = template
            return FamilyRenderer(
                family,
                template.vocabulary,
                looks_back=_safe_tail(renderer),
                grammar=template.grammar,
                bridging=bridging,
            )
    if certain:
        with suppress(OSError):
            disproven.parent.mkdir(parents=True, exist_ok=True)
            disproven.touch()
    return None


def _proof_key(template: TemplateRenderer | NamedTemplates) -> str:
    """A digest of all that a proof depends on: tokenizer, template, whether it sees, and the code that compares."""
    vocabulary = template.vocabulary
    templates = [template.plain, template.tooled] if isinstance(template, NamedTemplates) else [template]
    parts = [
        vocabulary.serialised(),
        *(one.vocabulary.hf.chat_template for one in templates),
        repr(vocabulary.hf.special_tokens_map),
    ]
    parts += ["sees" if _sees(vocabulary) else "reads"]
    parts += [f"{name} {version(name)}" for name in ("renderers", "transformers", "jinja2")]
    parts += [Path(__file__).with_name(name).read_text() for name in ("families.py", "template.py", "probe.py")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _sees(vocabulary: Vocabulary) -> bool:
    return (Path(vocabulary.folder) / PROCESSOR_CONFIG).is_file()


def _candidates(vocabulary: Vocabulary) -> list[str]:
    """All families, in the order in which they are tried: a text-only one may write the same ids as one with images."""
    found = families()
    return sorted(found, key=lambda family: family not in IMAGE_PLACEHOLDERS) if _sees(vocabulary) else found


def named_family(family: str, vocabulary: Vocabulary) -> FamilyRenderer:
    """A family by its name, without a proof that it writes what the template writes."""
    return FamilyRenderer(family, vocabulary, looks_back=_safe_tail(FamilyRenderer(family, vocabulary)))


def _same_ids(renderer: FamilyRenderer, template: TemplateRenderer | NamedTemplates) -> bool:
    compared = 0
    for messages, tools in proofs():
        try:
            expected = template.render(messages, tools)
        except Unrenderable:
            continue
        try:
            if renderer.render(messages, tools) != expected:
                return False
        except Unrenderable:
            return False
        compared += 1
    return compared > 0


def _same_bridges(renderer: FamilyRenderer, template: TemplateRenderer) -> bool:
    """Whether a family appends what the template writes after an answer, wherever both append something."""
    question, call = Message("user", "and?"), ToolCall("look_up", {}, "abcdef123")
    result = Message("tool", "42", None, (), call.id, call.name)
    try:
        prompt = template.render([question])
    except Unrenderable:
        return True
    stop = template.vocabulary.id_of(template.traits.stop)
    response = [*template.vocabulary.encode("so"), *([] if stop is None else [stop])]
    for calls, new in (((), [question]), ((call,), [result]), ((call,), [result, question])):
        written = template.bridge(prompt, response, calls, new, [question])
        if written is not None and renderer.bridge(prompt, response, calls, new) not in (None, written):
            return False
    return True


def _safe_tail(renderer: FamilyRenderer) -> int | None:
    """How few of a prompt's ids suffice to bridge; None where fewer than all made a difference."""
    short = FamilyRenderer(renderer.name, renderer.vocabulary, looks_back=PROMPT_TAIL_TOKENS, grammar=renderer.grammar)
    for messages, tools in proofs():
        try:
            prompt = renderer.render(
                [Message("user", "long " * PROMPT_TAIL_TOKENS), Message("assistant", "so"), *messages], tools
            )
        except Unrenderable:
            continue
        for text in ("Well.", "<think>\nso\n</think>\n\nWell.", "<think>\nso"):
            sampled = renderer.vocabulary.encode(text)
            for response in (sampled, [*sampled, *list(renderer.stop_ids)[:1]]):
                new = [Message("user", "and?")]
                if short.bridge(prompt, response, (), new) != renderer.bridge(prompt, response, (), new):
                    return None
    return PROMPT_TAIL_TOKENS


#: Characters of the longest text whose ids are kept, and how many texts' are: role headers and markers are shorter.
CACHED_TEXT_CHARS, CACHED_TEXTS = 48, 4096


class CachingTokenizer:
    """The tokenizer as the `renderers` library needs it: ids from text, short texts from a cache.

    The library encodes the same few role headers and markers in every call, through a wrapper that takes longer than
    the encoding. Character offsets, by which it would say which token came from which message, are not offered: nobody
    here asks for them. Everything else is the transformers tokenizer's.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._short = lru_cache(CACHED_TEXTS)(lambda text: tuple(vocabulary.encode(text)))
        self._id = lru_cache(CACHED_TEXTS)(vocabulary.hf.convert_tokens_to_ids)

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Ids of a text, as transformers' `encode` gives them."""
        if add_special_tokens or options:
            found: list[int] = self._vocabulary.hf.encode(text, add_special_tokens=add_special_tokens, **options)
            return found
        return list(self._short(text)) if len(text) <= CACHED_TEXT_CHARS else self._vocabulary.encode(text)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **options: Any) -> str:
        """The text of ids, as transformers' `decode` gives it."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._vocabulary.decode(ids, skip_special=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Ids of tokens that are named by their text, as transformers gives them."""
        return self._id(tokens) if isinstance(tokens, str) else self._vocabulary.hf.convert_tokens_to_ids(tokens)

    def __getattr__(self, name: str) -> Any:
        if name == "__call__":
            raise AttributeError(name)  # calling it would mean offsets
        return getattr(self._vocabulary.hf, name)
