"""OpenAI's chat completions: messages and tools in, a message or its deltas out."""

from __future__ import annotations

from typing import Any

from headrace.data.errors import InvalidInput, shown
from headrace.gateway.dialects import openai
from headrace.gateway.dialects.shared import OfferedTools, arguments_text, check_function, conversation, offer_tools
from headrace.gateway.errors import Refusal
from headrace.gateway.request import (
    Ask,
    BadField,
    read_fields,
    take,
    take_max_tokens,
    take_n,
    take_sampling,
)
from headrace.gateway.turn import Choice, Turn, usage
from headrace.gateway.upstream.types import SampledChoice
from headrace.tokens import AnswerDelta, Message, ToolCall, read_messages


class OpenAIChat(openai.OpenAIDialect):
    """`POST /v1/chat/completions`."""

    def read(self, body: bytes) -> Ask:
        fields = read_fields(body)
        openai.refuse_unbuilt(fields)
        model = take(fields, "model", str, "default", "a string")
        messages = _messages(fields.pop("messages", None))
        offered = _offer(fields)
        stream, show_usage = openai.take_stream(fields)
        sampling = take_sampling(fields)
        most = take_max_tokens(fields, "max_completion_tokens", "max_tokens")
        if most is not None:
            sampling["max_tokens"] = most
        openai.take_format(fields, sampling)
        options = take(fields, "chat_template_kwargs", dict, None, "an object")
        parallel = take(fields, "parallel_tool_calls", bool, True, "true or false")
        return Ask(
            model=model,
            conversation=conversation(messages, offered, options, "messages"),
            sampling=sampling,
            n=take_n(fields),
            stream=stream,
            show_usage=show_usage,
            tops=_take_tops(fields),
            calls=offered.calls,
            must_call=offered.must_call,
            one_call=not parallel,
            show_ids=take(fields, "return_token_ids", bool, False, "true or false"),
            user=openai.user_of(fields),
            extra=fields,
        )

    def whole(self, turns: list[Turn]) -> Any:
        (turn,) = turns
        found = {
            **_head(turn, "chat.completion"),
            "choices": [_choice(turn, choice) for choice in turn.choices],
            "usage": usage(turns),
        }
        if turn.ask.show_ids:
            found["prompt_token_ids"] = turn.plan.ids.tolist()
        return found

    def events(self, turns: list[Turn]) -> ChatEvents:
        (turn,) = turns
        return ChatEvents(turn)


class ChatEvents:
    """Writes chunks with deltas of the choices' messages."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._called = [0] * len(turn.choices)

    def opening(self) -> bytes:
        turn = self._turn
        choices = [
            {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for choice in turn.choices
        ]
        head = _head(turn, "chat.completion.chunk")
        if turn.ask.show_ids:
            head["prompt_token_ids"] = turn.plan.ids.tolist()
        return b"".join(openai.event({**head, "choices": [choice]}) for choice in choices)

    def delta(self, turn: Turn, choice: Choice, delta: AnswerDelta, piece: SampledChoice | None) -> bytes:
        ask = turn.ask
        made = self._called[choice.index]
        calls = delta.tool_calls[: max(0, 1 - made)] if ask.one_call else delta.tool_calls
        self._called[choice.index] += len(calls)
        shown = piece is not None and bool(piece.ids) and (ask.tops is not None or ask.show_ids)
        if not (delta.content or delta.reasoning or calls or shown):
            return b""
        said: dict[str, Any] = {}
        if delta.reasoning:
            said["reasoning_content"] = said["reasoning"] = delta.reasoning
        if delta.content:
            said["content"] = delta.content
        if calls:
            said["tool_calls"] = [{"index": made + i, **_call(call)} for i, call in enumerate(calls)]
        row: dict[str, Any] = {"index": choice.index, "delta": said, "finish_reason": None}
        if piece is not None and ask.tops is not None:
            since = len(choice.ids) - len(piece.ids)
            row["logprobs"] = {"content": openai.token_entries(choice, since, ask.tops)}
        if piece is not None and ask.show_ids:
            row["token_ids"] = piece.ids
        return openai.event({**_head(turn, "chat.completion.chunk"), "choices": [row]})

    def closing(self) -> bytes:
        turn = self._turn
        head = _head(turn, "chat.completion.chunk")
        events = [
            openai.event(
                {
                    **head,
                    "choices": [
                        {
                            "index": choice.index,
                            "delta": {},
                            "finish_reason": choice.finish_reason,
                        }
                    ],
                }
            )
            for choice in turn.choices
        ]
        if turn.ask.show_usage:
            events.append(openai.event({**head, "choices": [], "usage": usage([turn])}))
        return b"".join(events) + openai.DONE

    def error(self, refusal: Refusal) -> bytes:
        return openai.error_event(refusal)


def _messages(given: Any) -> tuple[Message, ...]:
    try:
        return read_messages(given)
    except InvalidInput as error:
        raise BadField(str(error), "messages") from None


def _head(turn: Turn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.call_id}", "object": kind, "created": turn.created, "model": turn.ask.model}


def _choice(turn: Turn, choice: Choice) -> dict[str, Any]:
    ask = turn.ask
    found: dict[str, Any] = {
        "index": choice.index,
        "message": _message(choice.message(one_call=ask.one_call)),
        "logprobs": None if ask.tops is None else {"content": openai.token_entries(choice, 0, ask.tops)},
        "finish_reason": choice.finish_reason,
    }
    if ask.show_ids:
        found["token_ids"] = choice.ids
    return found


def _message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.tool_calls:
        found["content"] = message.content or None
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.reasoning is not None:
        found["reasoning_content"] = found["reasoning"] = message.reasoning
    return found


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_text(call)}}


def _offer(fields: dict[str, Any]) -> OfferedTools:
    tools = fields.pop("tools", None)
    choice = fields.pop("tool_choice", None)
    if tools is not None and not isinstance(tools, list):
        raise BadField(f"tools must be a list, not {shown(tools)}", "tools")
    for at, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise BadField(f"tools[{at}] must be an object of type function, not {shown(tool)}", "tools")
        check_function(function, f"tools[{at}].function")
    if choice is None or choice in ("auto", "none", "required"):
        return offer_tools(tools, choice or "auto")
    function = choice.get("function") if isinstance(choice, dict) else None
    if not isinstance(function, dict):
        raise BadField(
            f"tool_choice is {shown(choice)}; it must be auto, none, required, or an object that names a function",
            "tool_choice",
        )
    return offer_tools(tools, "required", (function.get("name"),))


def _take_tops(fields: dict[str, Any]) -> int | None:
    wanted = take(fields, "logprobs", bool, False, "true or false")
    tops = take(fields, "top_logprobs", int, None, "an integer")
    if tops is None:
        return 0 if wanted else None
    if not wanted and tops > 0:
        raise BadField("top_logprobs needs logprobs to be true", "top_logprobs")
    if not 0 <= tops <= openai.MAX_TOPS:
        raise BadField(f"top_logprobs is {tops}; it must lie in 0..{openai.MAX_TOPS}", "top_logprobs")
    return tops if wanted else None
