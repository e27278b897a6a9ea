"""`headrace check-model`: what of a model can be recorded exactly, found out from its tokenizer's folder alone.

A scripted model says what the chat template would write for it, over five turns with a system message, tools, one call
and several, results and reasoning. What is asked: does each prompt continue, bit for bit, what was sampled; are calls
and reasoning read back as they were meant, whole and streamed; does the check of each step hold?
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.checkup.kept import kept
from headrace.checkup.scripted import Sampled, TemplateSpeaker, chat_templates
from headrace.tokens import (
    AnswerDelta,
    Cause,
    Conversation,
    History,
    Message,
    Node,
    Parsed,
    PromptPlan,
    Renderer,
    ToolCall,
    Unrenderable,
    check_step,
    load_renderer,
    plan_prompt,
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks things up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "q": {"type": "string", "description": "what to look for"},
                    "deep": {"type": "boolean", "description": "whether to look everywhere"},
                    "n": {"type": "integer", "description": "how many to find"},
                },
                "required": ["q"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "send_mail",
            "description": "Sends mail.",
            "parameters": {
                "type": "object",
                "properties": {
                    "to": {"type": "array", "items": {"type": "string"}, "description": "to whom"},
                    "about": {
                        "type": "object",
                        "description": "what it is about",
                        "properties": {},
                        "additionalProperties": {"type": "array", "items": {"type": "number"}},
                    },
                },
                "required": ["to"],
            },
        },
    },
]
SYSTEM = Message("system", "You are terse. Grüße! 🙂")
ONE = (ToolCall("look_up", {"q": 'Zürich "HB"\nnow', "deep": True, "n": 3}, "abcdef123"),)
SEVERAL = (
    ToolCall("look_up", {"q": "東京 🙂"}, "ghijkl456"),
    ToolCall("send_mail", {"to": ["a@b.c", "d"], "about": {"x": [1, 2.5, None]}}, "mnopqr789"),
)
#: Letters from which on a text is no marker.
INSTRUCTION_LETTERS = 40
READ, NONE, REFUSED = "read", "none", "refused by the template"
BRIDGED = "yes"


@dataclass
class ModelReport:
    """What was found. `trouble` says what is not as a trainer needs it, each in a sentence."""

    folder: str
    renderer: str = ""
    form: str = NONE
    bridged: dict[str, str] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    reasoning: str = NONE
    system: str = "written"
    images: str = NONE
    kept: list[str] = field(default_factory=list)
    turns: int = 0
    trouble: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether every turn is continued, and everything that the model writes is read."""
        return not self.trouble

    def rows(self) -> list[tuple[str, str]]:
        """The findings as a table of names and what was found."""
        rows = [("renderer", self.renderer), ("system message", self.system)]
        rows += [(f"bridged: {kind}", found) for kind, found in self.bridged.items()]
        rows += [(f"tool calls: {kind}", found) for kind, found in self.tools.items()]
        rows += [("form of calls", self.form), ("reasoning", self.reasoning), ("images", self.images)]
        return [*rows, ("kept against the template", ", ".join(self.kept) or NONE)]

    def as_dict(self) -> dict[str, Any]:
        """The report as `--json` writes it."""
        return {**asdict(self), "well": self.well}


def check_model(folder: str | Path, family: str = "auto") -> ModelReport:
    """Tries the model of a tokenizer's folder. Raises `InvalidInput` where there is none, or it has no renderer."""
    return check_renderer(load_renderer(folder, family), str(folder))


def check_renderer(renderer: Renderer, folder: str = "") -> ModelReport:
    """Tries a renderer."""
    report = ModelReport(folder, renderer.name)
    report.images = NONE if isinstance(renderer.vision, str) else "taken"
    if renderer.grammar.calls is not None:
        report.form = str(type(renderer.grammar.calls.body).__struct_config__.tag)
    scripted = TemplateSpeaker(renderer)
    tools = TOOLS if scripted.writes_calls(TOOLS, ONE[0]) else []
    talk = ScriptedTalk(scripted, tools)
    try:
        scripted.text([SYSTEM, Message("user", "Hello?")], tools)
    except Unrenderable:
        report.system = REFUSED if any(chat_templates(renderer)) else report.system
    talk.messages = [SYSTEM] if report.system == "written" else []
    _play(talk, report)
    report.kept = sorted(talk.kept)
    report.turns = talk.turns
    report.trouble += [f"another text than the template's, without a name: {each}" for each in talk.unnamed]
    return report


def _play(talk: ScriptedTalk, report: ModelReport) -> None:
    """The five turns."""
    user, thought = "Wie spät ist es in Zürich? 日本 🙂", "I must look it up: café."
    if not talk.tools:
        report.tools = dict.fromkeys(("one", "several", "streamed"), NONE)
        for n, text in enumerate((user, "And in 東京?", "  two  spaces\nand lines\n", "Why?", "Enough.")):
            said = Message("assistant", f"Es ist 12:3{n}. 🙂", thought if n % 2 == 0 else None)
            _turn(talk, report, "a question after an answer" if n else "", [Message("user", text)], said)
        return
    report.tools = {"one": READ, "several": READ, "streamed": READ}
    first = Message("assistant", "", thought, ONE)
    _turn(talk, report, "", [Message("user", user)], first, "one")
    several = Message("assistant", "", None, SEVERAL)
    if not _turn(talk, report, "a result after a call", _results(talk, '{"time": "12:30"}'), several, "several"):
        report.tools["several"] = REFUSED
        single = Message("assistant", "", None, SEVERAL[1:])
        _turn(talk, report, "a result after a call", _results(talk, '{"time": "12:30"}'), single, "one")
    said = Message("assistant", "Es ist 12:30 – 🙂", "Now I know.")
    _turn(talk, report, "results after several calls", _results(talk, "found", ""), said)
    again = Message("assistant", "Let me see.", "Once more.", ONE)
    if not talk.can_say([*talk.messages, Message("user", "And in 東京?")], again):
        again = Message("assistant", "", "Once more.", ONE)  # some write text beside calls as reasoning
    _turn(talk, report, "a question after an answer", [Message("user", "And in 東京?")], again, "one")
    _alternative(talk, report, "a question with a result", [*_results(talk, "20:30"), Message("user", "Quick!")])
    _turn(talk, report, "a result after a call", _results(talk, "20:30"), Message("assistant", "20:30.", None))


def _results(talk: ScriptedTalk, *texts: str) -> list[Message]:
    calls = talk.messages[-1].tool_calls if talk.messages else ()
    return [Message("tool", text, None, (), call.id, call.name) for call, text in zip(calls, texts, strict=False)]


def _turn(
    talk: ScriptedTalk, report: ModelReport, kind: str, new: list[Message], answer: Message, tools: str = ""
) -> bool:
    """Plays one turn and writes down what it shows; whether the template could write the answer."""
    if not new:
        return True  # the calls before it were not read, which is told already
    try:
        done = talk.turn(new, answer)
    except Unrenderable as error:
        if tools != "several":
            report.trouble.append(f"{kind or 'the first turn'}: {error}")
        return tools != "several"
    if kind:
        report.bridged[kind] = BRIDGED if done.continued else f"no: {done.plan.cause}"
        if not done.continued:
            report.trouble.append(f"{kind} begins a branch: {done.plan.cause}")
    if tools and done.whole.tool_calls != done.sampled.answer.tool_calls and not _same_calls(done.whole, done.sampled):
        report.tools[tools] = f"not read: {renderer_reason(talk.renderer)}"
        report.trouble.append(f"{tools} call(s): read as {_told(done.whole)} from {done.sampled.text!r}")
    if done.streamed != whole_as_delta(done.whole):
        report.tools["streamed"] = "deltas do not add up"
        report.trouble.append(f"streamed as {done.streamed}, whole as {_told(done.whole)}")
    meant = done.sampled.answer
    if meant.reasoning:
        report.reasoning = READ
        if (done.whole.reasoning or "").strip() != meant.reasoning:
            report.reasoning = "not read"
            report.trouble.append(f"reasoning: read as {done.whole.reasoning!r} from {done.sampled.text!r}")
    if done.whole.content.strip() != meant.content:
        report.trouble.append(f"text: read as {done.whole.content!r} from {done.sampled.text!r}")
    if done.quarantine:
        report.trouble.append(f"quarantined: {done.quarantine} ({done.sampled.text!r})")
    return True


def _alternative(talk: ScriptedTalk, report: ModelReport, kind: str, new: list[Message]) -> None:
    """Whether other messages could follow; nothing is said to them."""
    try:
        plan = talk.plan(new)
        report.bridged[kind] = BRIDGED if plan.cause is Cause.EXTENDED else f"no: {plan.cause}"
        if plan.cause is not Cause.EXTENDED:
            talk.scripted.text([*talk.messages, *new], talk.tools)
            report.trouble.append(f"{kind} begins a branch: {plan.cause}")
    except Unrenderable:
        report.bridged[kind] = REFUSED


def renderer_reason(renderer: Renderer) -> str:
    return renderer.grammar.unread or "the answer does not follow the form that was learned"


def _same_calls(parsed: Parsed, sampled: Sampled) -> bool:
    read = [(call.name, call.arguments) for call in parsed.tool_calls]
    return read == [(call.name, call.arguments) for call in sampled.answer.tool_calls]


def _told(parsed: Parsed) -> str:
    calls = ", ".join(f"{call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in parsed.tool_calls)
    return f"{parsed.content!r} with calls [{calls}]"


@dataclass(frozen=True)
class PlayedTurn:
    """One turn: its prompt, what was sampled, and how that was read."""

    plan: PromptPlan
    sampled: Sampled
    whole: Parsed
    streamed: tuple[str, str, tuple[tuple[str, str, str], ...]]
    quarantine: str

    @property
    def continued(self) -> bool:
        """Whether the prompt begins with what was sampled before."""
        return self.plan.cause in (Cause.EXTENDED, Cause.FIRST)


class ScriptedTalk:
    """A conversation with a scripted model through the same steps as in the gateway: plan, sample, read, check."""

    def __init__(self, scripted: TemplateSpeaker, tools: Sequence[dict[str, Any]]) -> None:
        self.scripted = scripted
        self.renderer = scripted.renderer
        self.tools = list(tools)
        self.messages: list[Message] = []
        self.turns = 0
        self.kept: set[str] = set()
        self.unnamed: list[str] = []
        self._history = History()

    def plan(self, new: Sequence[Message]) -> PromptPlan:
        """The prompt of the conversation with new messages."""
        return plan_prompt(self.renderer, self._history, self._conversation(new))

    def can_say(self, messages: Sequence[Message], answer: Message) -> bool:
        """Whether the template writes such an answer."""
        try:
            self.scripted.sample([], messages, self.tools, answer)
        except Unrenderable:
            return False
        return True

    def turn(self, new: Sequence[Message], answer: Message, cuts: Sequence[int] = ()) -> PlayedTurn:
        """Sends new messages, which are answered with `answer`; streamed in pieces that end at `cuts`, or id by id.

        Raises `Unrenderable` where the template refuses the messages or the answer; nothing has happened then.
        """
        conversation = self._conversation(new)
        plan = plan_prompt(self.renderer, self._history, conversation)
        prompt = plan.ids.tolist()
        sampled = self.scripted.sample(prompt, conversation.messages, self.tools, answer)
        self._compare(plan, conversation)
        whole = self.renderer.parse(prompt, sampled.ids, tools=self.tools, new_id=self._new_id)
        stream = self.renderer.stream(prompt, tools=self.tools, new_id=self._new_id)
        ends = [*(cut for cut in cuts if cut < len(sampled.ids)), len(sampled.ids)] if cuts else None
        deltas = [stream.feed(piece) for piece in _pieces(sampled.ids, ends)]
        streamed = summed([*deltas, stream.finish()])
        response = np.asarray(sampled.ids, np.int32)
        quarantine = check_step(
            self.renderer.vocabulary,
            prompt=plan.ids,
            response=response,
            log_probs=[-0.5] * len(response),
            parent=plan.parent,
            text=sampled.text,
            stop_ids=self.renderer.stop_ids,
        )
        self._remember(conversation, plan, whole, response)
        return PlayedTurn(plan, sampled, whole, streamed, quarantine or "")

    def _conversation(self, new: Sequence[Message]) -> Conversation:
        return Conversation((*self.messages, *new), self.tools or None, None)

    def _new_id(self, number: int) -> str:
        return f"call_{self.turns}_{number}"

    def _remember(self, conversation: Conversation, plan: PromptPlan, whole: Parsed, response: Any) -> Node:
        self.messages = [*conversation.messages, whole.message]
        self.turns += 1
        record = self._history.record(conversation, whole.message, plan.parent)
        return self._history.add(record, plan.ids, response, plan.parent, self.turns)

    def _compare(self, plan: PromptPlan, conversation: Conversation) -> None:
        """Notes in what a continued prompt is not what the template would write."""
        if not plan.bridged:
            return
        try:
            template = self._rendered(conversation.messages, self.tools)
        except Unrenderable:
            return
        ours, grammar = self.renderer.vocabulary.decode(plan.ids.tolist()), self.renderer.grammar
        names = kept(ours, template, conversation.messages, self.tools, grammar, self._movable(conversation))
        self.kept |= {name for name in names if " for " not in name}
        self.unnamed += [name for name in names if " for " in name and name not in self.unnamed]

    def _rendered(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        return self.renderer.vocabulary.decode(self.renderer.render(messages, tools))

    def _movable(self, conversation: Conversation) -> dict[str, str]:
        """What the template writes of the tools and of the system message."""
        question = [Message("user", "question")]
        systems = [message for message in conversation.messages[:1] if message.role == "system"]
        try:
            bare = self._rendered(question)
            tools = inserted(bare, self._rendered(question, self.tools)) if self.tools else ""
            system = inserted(bare, self._rendered([*systems, *question])) if systems else ""
        except Unrenderable:
            return {}
        return {"tools": tools, "system": system, "instructions": self._instructions()}

    def _instructions(self) -> str:
        """What the template writes before an answer that is still to come, and not before one that has followers."""
        asked, said = Message("user", "question"), Message("assistant", "answered")
        try:
            now = self._rendered([asked], self.tools).rpartition("question")[2]
            then = self._rendered([asked, said, Message("user", "more")], self.tools)
        except Unrenderable:
            return ""
        before = then.partition("answered")[0].rpartition("question")[2]
        found = inserted(before, now)
        return found if sum(map(str.isalpha, found)) >= INSTRUCTION_LETTERS else ""


def inserted(one: str, other: str) -> str:
    """What stands in the second text and not in the first, where it is one piece; else nothing."""
    before = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    rest = len(one) - before
    return other[before : len(other) - rest] if other.endswith(one[before:]) else ""


def _pieces(ids: Sequence[int], ends: list[int] | None) -> list[Sequence[int]]:
    if ends is None:
        return [[i] for i in ids]
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]


def summed(deltas: Sequence[AnswerDelta]) -> tuple[str, str, tuple[tuple[str, str, str], ...]]:
    """What deltas add up to: content, reasoning, and of each call its id, name and arguments' text."""
    calls: list[list[str]] = []
    for delta in deltas:
        for new in delta.tool_calls:
            while new.index >= len(calls):
                calls.append(["", "", ""])
            made = calls[new.index]
            made[0], made[1], made[2] = made[0] + new.id, made[1] + new.name, made[2] + new.arguments
    content = "".join(delta.content for delta in deltas)
    return content, "".join(delta.reasoning for delta in deltas), tuple((a, b, c) for a, b, c in calls)


def whole_as_delta(whole: Parsed) -> tuple[str, str, tuple[tuple[str, str, str], ...]]:
    """A whole answer in the form of `summed`."""
    calls = tuple(
        (call.id, call.name, call.written or json.dumps(call.arguments, ensure_ascii=False))
        for call in whole.tool_calls
    )
    return whole.content, whole.reasoning or "", calls
