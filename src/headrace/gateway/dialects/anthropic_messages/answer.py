"""A turn as Anthropic's message: its content blocks, how it ended, and what it took."""

from __future__ import annotations

import base64
from hashlib import blake2b
from typing import Any

from headrace.gateway.call.turn import Choice, Turn
from headrace.gateway.dialects.anthropic_messages.blocks import RAW
from headrace.gateway.dialects.seal import seal
from headrace.tokens import ToolCall

Json = dict[str, Any]

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
DIGEST = 16


def message(turn: Turn, content: list[Json], ending: Json) -> Json:
    """The object, as far as it has come."""
    head = {"id": f"msg_{turn.call_id}", "type": "message", "role": "assistant", "model": turn.ask.model}
    return {**head, "content": content, **ending, "usage": usage(turn)}


def content_of(turn: Turn, choice: Choice) -> list[Json]:
    """An answer's blocks; a text of nothing but white space is none."""
    said = choice.message(one_call=turn.ask.one_call)
    blocks: list[Json] = []
    if said.reasoning:
        shown: bool = turn.ask.notes.show_thinking
        sign = signature(said.reasoning, shown=shown)
        blocks.append({"type": "thinking", "thinking": said.reasoning if shown else "", "signature": sign})
    if said.content and not said.content.isspace():
        blocks.append({"type": "text", "text": said.content})
    return blocks + [tool_use(call) for call in said.tool_calls]


def tool_use(call: ToolCall) -> Json:
    """A call as a block. Anthropic's arguments are an object, whatever the model wrote."""
    given = call.arguments if isinstance(call.arguments, dict) else {RAW: call.arguments}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def signature(thought: str, *, shown: bool) -> str:
    """What stands for reasoning. Where it is not shown, the signature is all that comes back, and holds it."""
    if not shown:
        return seal(thought)
    data = thought.encode("utf-8", "surrogatepass")
    return base64.b64encode(blake2b(data, digest_size=DIGEST).digest()).decode()


def ending_of(turn: Turn, choice: Choice) -> Json:
    """Why it ended, and at which of the stop sequences."""
    matched = choice.sampled.stop_reason if choice.sampled is not None else None
    if isinstance(matched, str) and matched in turn.ask.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": STOP_REASONS.get(choice.finish_reason, "end_turn"), "stop_sequence": None}


def usage(turn: Turn) -> dict[str, int]:
    """The whole prompt counts as input: what a rollout server has in its cache is its own affair."""
    return {
        "input_tokens": len(turn.plan.ids),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": sum(len(choice.ids) for choice in turn.choices),
    }
