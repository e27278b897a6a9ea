"""What a model samples for a given answer, as its own chat template writes that answer into a history.

So a tokenizer's folder is enough to try everything that happens to a model's answers, without the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.tokens import Message, Renderer, ToolCall, Unrenderable, Vocabulary
from headrace.tokens.forms import THINK, Channels, Grammar
from headrace.tokens.grammars import learned, writer
from headrace.tokens.messages import to_dict
from headrace.tokens.named import NamedTemplates
from headrace.tokens.samples import REASONING_FIELDS, Quirks
from headrace.tokens.template import PINNED_OPTIONS, short_id

Tools = Sequence[Mapping[str, Any]]
#: Characters of a prompt's end that decide how a tokenizer cuts the beginning of what follows.
JOINT_CHARACTERS = 24
#: Ids of a prompt's end that decide how a server writes the beginning of what follows.
JOINT_TOKENS = 8
_PIECES = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|\s|\w+|.")


@dataclass(frozen=True)
class Sampled:
    """An answer as a model samples it. `answer` is what of it the template writes: some leave out what stands beside
    calls, or reasoning. `text` is what a server says of the ids, without the token that ended the turn."""

    ids: tuple[int, ...]
    text: str
    answer: Message


class TemplateSpeaker:
    """Writes answers as a renderer's model does."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.vocabulary: Vocabulary = renderer.vocabulary
        plain, tooled = chat_templates(renderer)
        self.grammar: Grammar = renderer.grammar
        self._write = {
            with_tools: writer(self.vocabulary, template, PINNED_OPTIONS)
            for with_tools, template in ((False, plain), (True, tooled))
            if template
        }
        self._quirks = learned(self.vocabulary, tooled, PINNED_OPTIONS).quirks if tooled else Quirks()
        self._stops = [self.vocabulary.added[i] for i in renderer.stop_ids if i in self.vocabulary.added]

    def text(self, messages: Sequence[Message], tools: Tools = (), *, generate: bool = True) -> str:
        """A conversation as the template writes it. Raises `Unrenderable` where it refuses to."""
        if not self._write:
            raise Unrenderable("there is no chat template")
        offered = [dict(tool) for tool in tools] or None
        try:
            return self._write[bool(tools)]([self._given(message) for message in messages], offered, generate)
        except Exception as error:  # templates are programs of strangers and may raise anything
            raise Unrenderable(f"the chat template refuses these messages: {error}") from error

    def writes_calls(self, tools: Tools, call: ToolCall) -> bool:
        """Whether the template writes tool calls at all."""
        if not self._write:
            return self.grammar.calls is not None
        try:
            asked = [Message("user", "question"), Message("assistant", "", None, (call,))]
            text = self.text(asked, tools, generate=False)
        except Unrenderable:
            return False
        return call.name in text.rpartition("question")[2]

    def sample(self, prompt: Sequence[int], messages: Sequence[Message], tools: Tools, answer: Message) -> Sampled:
        """The ids that say `answer` after a prompt, whose messages are given. Raises `Unrenderable`."""
        own, said = self._answer(messages, tools, answer)
        stop = next((token for token in self._stops if own.endswith(token)), "")
        spoken = own.removesuffix(stop)
        before = self.vocabulary.decode(prompt[-JOINT_CHARACTERS:])[-JOINT_CHARACTERS:]
        head, joined = self.vocabulary.encode(before), self.vocabulary.encode(before + spoken)
        ids = joined[len(head) :] if joined[: len(head)] == head else self.vocabulary.encode(spoken)
        last = self.vocabulary.id_of(stop) if stop else self.vocabulary.hf.eos_token_id
        tail = [int(i) for i in prompt[-JOINT_TOKENS:]]
        text = self.vocabulary.decode([*tail, *ids])[len(self.vocabulary.decode(tail)) :]
        return Sampled((*ids, *(() if last is None else (int(last),))), text, said)

    def _answer(self, messages: Sequence[Message], tools: Tools, answer: Message) -> tuple[str, Message]:
        """The answer's text up to the token that ends it, and what of the answer stands in it."""
        if not self._write:
            return self._by_form(answer), answer
        own = self._written(messages, tools, answer)
        opened = self._ends(self.text(messages, tools), "open")
        reasoning = answer.reasoning
        if reasoning is not None and reasoning not in own:
            if self.grammar.reasoning is None:
                reasoning = None
            else:
                own = self._thought(reasoning, opened=opened) + self._without_thought(own)
        elif reasoning is None and opened:
            own = self._thought("", opened=True) + self._without_thought(own)
        content = answer.content if answer.content in own else ""
        return own, Message("assistant", content, reasoning, answer.tool_calls)

    def _written(self, messages: Sequence[Message], tools: Tools, answer: Message) -> str:
        """What the template writes of an answer after a prompt. A template that writes earlier turns otherwise, or this
        one because of them, is asked with fewer of them."""
        question, refusals = Message("user", "question"), []
        for before, offered in ((messages, tools), ([question], tools), ([question], ())):
            try:
                return self._written_after(before, offered, answer)
            except Unrenderable as error:
                refusals.append(error)
        raise refusals[0]

    def _written_after(self, before: Sequence[Message], tools: Tools, answer: Message) -> str:
        prompt, whole = self.text(before, tools), self.text([*before, answer], tools, generate=False)
        if whole.startswith(prompt):
            own = whole[len(prompt) :]
        else:
            shared = _shared(prompt, whole)
            if len(shared) < len(self._before_answer(prompt, before, tools)):
                raise Unrenderable("what the chat template writes of an answer cannot be told from what is before it")
            own = _without_header(whole[len(shared) :], prompt)
            if self._ends(prompt, "close"):  # a thought that the prompt ended
                own = self._without_thought(own) if not self._ends(shared, "open") else self._opener + own
        own = self._with_stop(own, before, tools, answer)
        names = [call.name for call in answer.tool_calls]
        if any(own.count(name) < names.count(name) for name in names):
            raise Unrenderable("the chat template leaves out these calls")
        return own

    @property
    def _opener(self) -> str:
        return (self.grammar.reasoning or THINK).open

    def _before_answer(self, prompt: str, messages: Sequence[Message], tools: Tools) -> str:
        """The part of a prompt that stands before anything of an answer."""
        try:
            other = self.text([*messages, Message("user", "more")], tools, generate=False)
        except Unrenderable:
            other = self.text(messages, tools, generate=False)
        return _shared(prompt, other).rstrip()

    def _ends(self, prompt: str, mark: str) -> bool:
        """Whether a prompt ends with the mark that opens or closes reasoning."""
        return self.grammar.reasoning is not None and prompt.rstrip().endswith(
            getattr(self.grammar.reasoning, mark).strip()
        )

    def _thought(self, reasoning: str, *, opened: bool) -> str:
        if self.grammar.calls is not None and isinstance(form := self.grammar.calls.body, Channels):
            thought = f"{form.channel}{form.reasoning}{form.message}{reasoning}{form.end}{form.start}assistant"
            return thought if reasoning else ""
        marks = self.grammar.reasoning or THINK
        between = "" if marks.close.strip() != marks.close or not marks.close.startswith("</") else "\n"
        opening = "" if opened else marks.open + between
        return opening + reasoning + between + marks.close + between * 2

    def _without_thought(self, own: str) -> str:
        """An answer's text without the empty thought that the template writes before it, or the end of one."""
        marks, text = self.grammar.reasoning or THINK, own.lstrip()
        return text.removeprefix(marks.open.strip()).lstrip().removeprefix(marks.close.strip()).lstrip()

    def _by_form(self, answer: Message) -> str:
        """An answer where no template shows how it is written."""
        own = "" if answer.reasoning is None else self._thought(answer.reasoning, opened=False)
        own += answer.content
        if self.grammar.calls is not None and answer.tool_calls:
            own += self.grammar.calls.written(answer.tool_calls)
        return own + str(self.vocabulary.hf.eos_token or "")

    def _with_stop(self, own: str, messages: Sequence[Message], tools: Tools, answer: Message) -> str:
        """The answer without what is written behind the token that ends its turn; with that token, where it is the next
        turn's first."""
        last = answer.tool_calls[-1].name if answer.tool_calls else answer.content
        said = max(own.rfind(last), 0) + len(last)
        if any(token in own[:said] for token in self._stops):
            raise Unrenderable("the chat template writes this answer as several turns")
        ends = [own.index(token, said) + len(token) for token in self._stops if token in own[said:]]
        opener = self._turn_opener(messages, tools)
        if opener and opener in own[said : min(ends, default=len(own))]:
            return own[: own.index(opener, said)].rstrip()
        if ends:
            return own[: min(ends)]
        results = [Message("tool", "found", None, (), call.id, call.name) for call in answer.tool_calls]
        try:
            followed = self.text([*messages, answer, *(results or [Message("user", "more")])], tools)
        except Unrenderable:
            return own.rstrip()
        _, _, after = followed.rpartition(own.rstrip())
        opener = next((token for token in self._stops if after.lstrip().startswith(token)), "")
        return own.rstrip() + opener

    def _turn_opener(self, messages: Sequence[Message], tools: Tools) -> str:
        """The marker with which any turn begins; "" where turns have none in common."""
        before = self._before_answer(self.text(messages, tools), messages, tools)
        found = _PIECES.findall(before[-JOINT_CHARACTERS * 2 :])
        last = found[-1] if found else ""
        return last if last in self.vocabulary.added.values() and last not in self._stops else ""

    def _given(self, message: Message) -> dict[str, Any]:
        given = to_dict(message)
        if message.role == "assistant" and message.reasoning is not None:
            given |= dict.fromkeys(REASONING_FIELDS, message.reasoning)
        for number, call in enumerate(given.get("tool_calls", ())):
            name = call["function"]["name"]
            if self._quirks.ids == "short":
                call["id"] = short_id(call["id"])
            elif self._quirks.ids and name not in call["id"]:
                call["id"] = self._quirks.ids.replace("{name}", name).replace("{id}", str(number))
            if self._quirks.text_arguments:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        if self._quirks.ids == "short" and "tool_call_id" in given:
            given["tool_call_id"] = short_id(given["tool_call_id"])
        if self._quirks.null_content and message.tool_calls and not message.content:
            given["content"] = None
        return given


def chat_templates(renderer: Renderer) -> tuple[str, str]:
    """The chat templates by which a renderer writes without tools and with them; "" where there is none."""
    plain = renderer.plain if isinstance(renderer, NamedTemplates) else renderer
    tooled = renderer.tooled if isinstance(renderer, NamedTemplates) else renderer
    return str(plain.vocabulary.hf.chat_template or ""), str(tooled.vocabulary.hf.chat_template or "")


def _without_header(own: str, prompt: str) -> str:
    """An answer's text without the markers by which the prompt has opened its turn already."""
    pieces = _PIECES.findall(own[: JOINT_CHARACTERS * 4])
    for n in range(len(pieces), 0, -1):
        header = "".join(pieces[:n])
        if header.strip() and prompt.endswith(header.lstrip()):
            return own[len(header) :]
    return own


def _shared(one: str, other: str) -> str:
    """What two texts begin with alike, up to the end of a word or a marker."""
    same = []
    for mine, theirs in zip(_PIECES.findall(one), _PIECES.findall(other), strict=False):
        if mine != theirs:
            break
        same.append(mine)
    return "".join(same)
