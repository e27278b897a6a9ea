"""Anthropic's Messages: system, messages and tools in, a message of content blocks or its events out."""

from __future__ import annotations

from typing import Any

from headrace.gateway.call.ask import (
    Ask,
    BadField,
    read_fields,
    take,
    take_max_tokens,
    take_sampling,
)
from headrace.gateway.call.turn import Turn
from headrace.gateway.dialects import anthropic
from headrace.gateway.dialects.anthropic_messages.answer import content_of, ending_of, message
from headrace.gateway.dialects.anthropic_messages.blocks import read_messages, read_system
from headrace.gateway.dialects.anthropic_messages.events import MessageEvents
from headrace.gateway.dialects.anthropic_messages.fields import (
    refuse_unbuilt,
    take_format,
    take_stops,
    take_thinking,
    take_user,
)
from headrace.gateway.dialects.anthropic_messages.tools import take_tools
from headrace.gateway.dialects.tools import conversation
from headrace.gateway.errors import Refusal

__all__ = ["AnthropicMessages"]


class AnthropicMessages:
    """`POST /v1/messages`, and `/v1/messages/count_tokens`."""

    vendor = "Anthropic"

    def read(self, body: bytes) -> Ask:
        fields = read_fields(body)
        most = take_max_tokens(fields, "max_tokens")
        if most is None:
            raise BadField("max_tokens is missing; say how many tokens an answer may have", "max_tokens")
        ask = _ask(fields)
        ask.sampling["max_tokens"] = most
        return ask

    def read_count(self, body: bytes) -> Ask:
        """A call that need not say how it is to be answered."""
        return _ask(read_fields(body))

    def counted(self, tokens: int) -> Any:
        return {"input_tokens": tokens}

    def headers(self, call_id: str) -> dict[str, str]:
        return anthropic.headers(call_id)

    def whole(self, turns: list[Turn]) -> Any:
        (turn,) = turns
        (choice,) = turn.choices
        return message(turn, content_of(turn, choice), ending_of(turn, choice))

    def events(self, turns: list[Turn]) -> MessageEvents:
        (turn,) = turns
        return MessageEvents(turn)

    def error(self, refusal: Refusal) -> Any:
        return anthropic.error_body(refusal)


def _ask(fields: dict[str, Any]) -> Ask:
    refuse_unbuilt(fields)
    model = take(fields, "model", str, "default", "a string")
    messages = (*read_system(fields.pop("system", None)), *read_messages(fields.pop("messages", None)))
    offered, one_call = take_tools(fields)
    thinking, notes = take_thinking(fields)
    fields["stop"] = take_stops(fields)
    sampling = take_sampling(fields)
    take_format(fields, sampling)
    options = take(fields, "chat_template_kwargs", dict, None, "an object")
    return Ask(
        model=model,
        conversation=conversation(messages, offered, options, "messages"),
        sampling=sampling,
        stream=take(fields, "stream", bool, False, "true or false"),
        calls=offered.calls,
        must_call=offered.must_call,
        one_call=one_call,
        thinking=thinking,
        user=take_user(fields),
        notes=notes,
    )
