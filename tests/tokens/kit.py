"""A model that says what a test wants, and an agent that talks to it through the plan, as the gateway will."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from headrace.tokens import (
    Cause,
    Conversation,
    History,
    HistoryMode,
    Message,
    Node,
    Parsed,
    PromptPlan,
    Renderer,
    ToolCall,
    check_step,
    plan_prompt,
    read_messages,
)

LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks things up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "deep": {"type": "boolean"}}},
    },
}
FORMATS = {"qwen3": "hermes", "qwen2.5": "hermes", "llama3.2": "llama", "mistral-nemo": "mistral", "smollm2": "none"}
STOPS = {
    "qwen3": "<|im_end|>",
    "qwen2.5": "<|im_end|>",
    "llama3.2": "<|eot_id|>",
    "mistral-nemo": "</s>",
    "smollm2": "<|im_end|>",
}


def spoken(form: str, content: str, reasoning: str | None, calls: list[ToolCall]) -> str:
    """An answer as the model's family writes it, and as its template writes it into a history."""
    text = content if reasoning is None else f"<think>\n{reasoning}\n</think>\n\n{content}"
    if not calls:
        return text
    if form == "llama":
        (call,) = calls
        return f'{{"name": "{call.name}", "parameters": {dumps(call.arguments)}}}'
    if form == "mistral":
        written = (
            f'{{"name": "{call.name}", "arguments": {dumps(call.arguments)}, "id": "{call.id}"}}' for call in calls
        )
        return f"[TOOL_CALLS][{', '.join(written)}]"
    for i, call in enumerate(calls):
        lead = "\n" if i or content else ""
        text += f'{lead}<tool_call>\n{{"name": "{call.name}", "arguments": {dumps(call.arguments)}}}\n</tool_call>'
    return text


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def sampled(renderer: Renderer, text: str, cuts: list[int], end: str | None) -> list[int]:
    """Ids as a model might sample them: the text cut at odd places, so that no encoder would give the same ids."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    specials = [token for token in renderer.vocabulary.added.values() if token in text]
    ids: list[int] = []
    for start, stop in pairwise(places):
        ids += renderer.vocabulary.encode(text[start:stop])
    # A cut through a special token would spell it out in letters, which no model does.
    if renderer.vocabulary.decode(ids) != text or any(
        renderer.vocabulary.id_of(token) not in ids for token in specials
    ):
        ids = renderer.vocabulary.encode(text)
    last = renderer.vocabulary.id_of(end) if end else None
    return ids if last is None else [*ids, last]


def as_openai(message: Message) -> dict[str, Any]:
    """An answer as the gateway would send it to an OpenAI client."""
    out: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dumps(call.arguments)}}
            for call in message.tool_calls
        ]
    return out


@dataclass
class Talk:
    """A conversation through the plan: what was sent, what was sampled, and every cause that came up."""

    renderer: Renderer
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] | None = None
    mode: HistoryMode = "bridge"
    history: History = field(default_factory=History)
    causes: Counter[Cause] = field(default_factory=Counter)
    calls: int = 0
    compared: int = 0

    def ask(
        self, messages: list[dict[str, Any]], tools: Any = ..., options: Any = ...
    ) -> tuple[Conversation, PromptPlan]:
        request = Conversation(
            read_messages(messages),
            self.tools if tools is ... else tools,
            self.options if options is ... else options,
        )
        plan = plan_prompt(self.renderer, self.history, request, self.mode)
        self.causes[plan.cause] += 1
        if plan.parent is None:
            assert plan.cause is not Cause.EXTENDED
            assert plan.kept == 0
        else:
            before = plan.parent.whole()
            assert plan.cause is Cause.EXTENDED
            assert plan.kept == len(before) < len(plan.ids)
            assert np.array_equal(plan.ids[: len(before)], before)
        return request, plan

    def answer(self, request: Conversation, plan: PromptPlan, ids: list[int]) -> tuple[Parsed, Node]:
        parsed = self.renderer.parse(plan.ids.tolist(), ids, tools=bool(request.tools), new_id=self._new_id)
        response = np.asarray(ids, np.int32)
        text = self.renderer.vocabulary.decode([i for i in ids if i not in self.renderer.stop_ids])
        trouble = check_step(
            self.renderer.vocabulary,
            prompt=plan.ids,
            response=response,
            log_probs=[-0.5] * len(ids),
            parent=plan.parent,
            text=text,
            stop_ids=self.renderer.stop_ids,
        )
        assert trouble is None
        record = self.history.record(request, parsed.message, plan.parent)
        node = self.history.add(record, plan.ids, response, plan.parent, len(self.history.nodes))
        self.calls += 1
        return parsed, node

    def say(self, messages: list[dict[str, Any]], text: str, end: str | None = None, **given: Any) -> tuple[Any, Node]:
        """One call whose answer is `text`; the answer as the client gets it, and the node."""
        request, plan = self.ask(messages, **given)
        ids = self.renderer.vocabulary.encode(text)
        parsed, node = self.answer(request, plan, ids + ([self.renderer.vocabulary.id_of(end)] if end else []))
        return as_openai(parsed.message), node

    def _new_id(self, number: int) -> str:
        return f"call_{self.calls}_{number}"
