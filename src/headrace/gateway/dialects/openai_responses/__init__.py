"""OpenAI's Responses: items and tools in, a response of items or its events out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.gateway.dialects import openai
from headrace.gateway.dialects.openai_responses.answer import (
    RESPONSE_ID_PREFIX,
    ResponseEvents,
    ResponsesNotes,
    ended,
    output_of,
)
from headrace.gateway.dialects.openai_responses.request import (
    INCLUDE_ENCRYPTED,
    read_input,
    references,
    refuse_unbuilt,
    take_echoed,
    take_include,
    take_offer,
    take_reasoning,
    take_text,
    take_top_logprobs,
)
from headrace.gateway.dialects.shared import conversation
from headrace.gateway.request import CallRequest, References, read_fields, take, take_max_tokens, take_sampling
from headrace.gateway.turn import Turn
from headrace.tokens import Message

__all__ = ["OpenAIResponses"]


def _input(
    given: Any, opening: tuple[Message, ...], *, continued: bool
) -> tuple[tuple[Message, ...], References | None]:
    """The messages of a request, and the references in it, which are read once the earlier answers are found."""
    calls = references(given)
    messages = (*opening, *read_input(given, continued=continued or bool(calls)))

    def read(answers: Mapping[str, Message]) -> tuple[Message, ...]:
        return (*opening, *read_input(given, continued=continued, answers=answers))

    return messages, References(calls, read) if calls else None


class OpenAIResponses(openai.OpenAIDialect):
    """`POST /v1/responses`."""

    def read(self, body: bytes) -> CallRequest:
        fields = read_fields(body)
        refuse_unbuilt(fields)
        model = take(fields, "model", str, "default", "a string")
        previous = take(fields, "previous_response_id", str, None, "a string")
        instructions = take(fields, "instructions", str, None, "a string")
        opening = (Message("system", instructions),) if instructions else ()
        messages, named = _input(fields.pop("input", None), opening, continued=previous is not None)
        echo: dict[str, Any] = {"tools": fields.get("tools") or [], "tool_choice": fields.get("tool_choice") or "auto"}
        offered, namespaces = take_offer(fields)
        stream, _ = openai.take_stream(fields)
        sampling = take_sampling(fields)
        most = take_max_tokens(fields, "max_output_tokens")
        if most is not None:
            sampling["max_tokens"] = most
        echo |= {"instructions": instructions, "max_output_tokens": most, "text": take_text(fields, sampling)}
        reasoning = take_reasoning(fields)
        echo |= {"reasoning": reasoning, **take_echoed(fields)}
        include = take_include(fields)
        top_logprobs = take_top_logprobs(fields, include)
        store = take(fields, "store", bool, True, "true or false")
        options = take(fields, "chat_template_kwargs", dict, None, "an object")
        return CallRequest(
            model=model,
            conversation=conversation(messages, offered, options, "input"),
            sampling=sampling,
            stream=stream,
            top_logprobs=top_logprobs,
            allow_tool_calls=offered.allow_tool_calls,
            required_tools=offered.required_tools,
            single_tool_call=not take(fields, "parallel_tool_calls", bool, True, "true or false"),
            thinking=False if reasoning["effort"] == "none" else None,
            user=echo["user"],
            return_token_ids=take(fields, "return_token_ids", bool, False, "true or false"),
            opening=len(opening),
            previous=None if previous is None else previous.removeprefix(RESPONSE_ID_PREFIX),
            references=named,
            store=store,
            dialect_notes=ResponsesNotes(
                {**echo, "top_logprobs": top_logprobs or 0}, namespaces, INCLUDE_ENCRYPTED in include or not store
            ),
            extra=fields,
        )

    def whole(self, turns: list[Turn]) -> Any:
        (turn,) = turns
        return ended(turn, output_of(turn))

    def events(self, turns: list[Turn]) -> ResponseEvents:
        (turn,) = turns
        return ResponseEvents(turn)
