"""OpenAI's chat completions, and what its other routes share with them: refused fields, formats, errors, log-probs.

A path that no dialect has is answered in OpenAI's shape too, which most SDKs read (`NoDialect`).
"""

from __future__ import annotations

from typing import Any, NoReturn

import orjson

from headrace.data.errors import InvalidInput, shown
from headrace.gateway.dialects.shared import OfferedTools, check_function, conversation, offer_tools
from headrace.gateway.errors import Refusal
from headrace.gateway.request import BadField, CallRequest, read_fields, take, take_max_tokens, take_n, take_sampling
from headrace.gateway.turn import Choice, Turn, usage
from headrace.gateway.upstream.types import SampledChoice
from headrace.tokens import AnswerDelta, CallDelta, Message, ToolCall, read_messages

DONE = b"data: [DONE]\n\n"
#: How a chunk ends whose delta is content alone.
AFTER_CONTENT = b'},"finish_reason":null}]}\n\n'

#: Fields that would change what is consumed or sampled, or how it is shown, in ways that are not built.
NOT_OFFERED = {
    "audio": "audio answers",
    "best_of": "best_of",
    "use_beam_search": "beam search",
    "echo": "echoing the prompt",
    "suffix": "filling in before a suffix",
    "prompt_embeds": "embeddings as a prompt",
    "prompt_logprobs": "log-probs of the prompt",
    "truncate_prompt_tokens": "cutting the prompt",
    "chat_template": "another chat template",
    "documents": "documents for the template",
    "continue_final_message": "continuing the last message",
    "functions": "functions (use tools)",
    "function_call": "function_call (use tool_choice)",
    "web_search_options": "web search",
    "return_tokens_as_token_ids": "token ids in place of texts (ask for return_token_ids)",
}
MAX_TOP_LOGPROBS = 20


def refuse_unbuilt(fields: dict[str, Any]) -> None:
    """Raises `BadField` for a field that should change the answer and cannot; drops those that change nothing."""
    for name in NOT_OFFERED.keys() & fields.keys():
        if fields[name] and not (name == "best_of" and fields[name] == 1):
            raise BadField(f"{name}: {NOT_OFFERED[name]} is not offered here; leave it out", name)
        del fields[name]
    modalities = fields.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise BadField(f"modalities is {shown(modalities)}; only text is offered", "modalities")
    if fields.pop("add_generation_prompt", True) is False:
        raise BadField("add_generation_prompt is false; an answer is always begun anew here", "add_generation_prompt")
    if fields.pop("skip_special_tokens", True) is False:
        raise BadField("skip_special_tokens is false; ask for return_token_ids to see them", "skip_special_tokens")


def take_stream(fields: dict[str, Any]) -> tuple[bool, bool]:
    """Takes `stream` and `stream_options`: whether to stream, and whether to tell the usage at its end."""
    stream = fields.pop("stream", None)
    if stream is not None and type(stream) is not bool:
        raise BadField(f"stream must be true or false, not {shown(stream)}", "stream")
    options = fields.pop("stream_options", None)
    if options is None:
        return bool(stream), False
    if not isinstance(options, dict):
        raise BadField(f"stream_options must be an object, not {shown(options)}", "stream_options")
    if not stream:
        raise BadField("stream_options is only for streams; set stream to true", "stream_options")
    return True, bool(options.get("include_usage"))


def user_of(fields: dict[str, Any]) -> str | None:
    """Whom an agent says it works for; the server is told so too."""
    user = fields.get("user")
    return user if isinstance(user, str) else None


def take_format(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    """`response_format` as what vLLM's completions honour; there it would be ignored under its own name."""
    given = fields.pop("response_format", None)
    holder = given.get("json_schema") if isinstance(given, dict) else None
    set_format(sampling, given, holder, "response_format")


def set_format(sampling: dict[str, Any], given: Any, holder: Any, param: str) -> None:
    """A format that was given under the name `param`; `holder` is the object that a schema would be in."""
    if given is None:
        return
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return
    if kind == "json_object":
        sampling["structured_outputs"] = {"json_object": True}
        return
    schema = holder.get("schema") if kind == "json_schema" and isinstance(holder, dict) else None
    if isinstance(schema, dict):
        sampling["structured_outputs"] = {"json": schema}
        return
    raise BadField(
        f"{param} is {shown(given)}; its type must be text, json_object, or json_schema with a schema in it", param
    )


class OpenAIDialect:
    """What the dialects of OpenAI's routes have in common."""

    vendor = "OpenAI"

    def headers(self, call_id: str) -> dict[str, str]:
        return {"x-request-id": call_id}

    def error(self, refusal: Refusal) -> Any:
        return error_body(refusal)


def error_body(refusal: Refusal) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {
        "error": {
            "message": str(refusal),
            "type": refusal.kind,
            "param": refusal.param,
            "code": refusal.reason,
        }
    }


def event(value: Any) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_event(refusal: Refusal) -> bytes:
    """The events of an error in a stream that has begun, which it ends."""
    return event(error_body(refusal)) + DONE


def token_entries(choice: Choice, since: int, top_logprobs: int) -> list[dict[str, Any]]:
    """The log-probs of an answer from token `since` on, as chat completions write them."""
    values = choice.log_probs or []
    return [
        {**_token(text, value), "top_logprobs": [_token(*pair) for pair in _best(choice.top, at, top_logprobs)]}
        for at, (text, value) in enumerate(zip(choice.tokens[since:], values[since:], strict=False), start=since)
    ]


def _token(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "surrogatepass"))}


def _best(top: list[dict[str, float]], at: int, top_logprobs: int) -> list[tuple[str, float]]:
    found = top[at] if at < len(top) and top[at] else {}
    return sorted(found.items(), key=lambda pair: -pair[1])[:top_logprobs]


# -- chat completions --------------------------------------------------------------------------------------------------


class OpenAIChat(OpenAIDialect):
    """`POST /v1/chat/completions`."""

    def read(self, body: bytes) -> CallRequest:
        fields = read_fields(body)
        refuse_unbuilt(fields)
        model = take(fields, "model", str, "default", "a string")
        messages = _messages(fields.pop("messages", None))
        offered = _offer(fields)
        stream, include_usage = take_stream(fields)
        sampling = take_sampling(fields)
        most = take_max_tokens(fields, "max_completion_tokens", "max_tokens")
        if most is not None:
            sampling["max_tokens"] = most
        take_format(fields, sampling)
        options = take(fields, "chat_template_kwargs", dict, None, "an object")
        parallel = take(fields, "parallel_tool_calls", bool, True, "true or false")
        return CallRequest(
            model=model,
            conversation=conversation(messages, offered, options, "messages"),
            sampling=sampling,
            n=take_n(fields),
            stream=stream,
            include_usage=include_usage,
            top_logprobs=_take_top_logprobs(fields),
            allow_tool_calls=offered.allow_tool_calls,
            required_tools=offered.required_tools,
            single_tool_call=not parallel,
            return_token_ids=take(fields, "return_token_ids", bool, False, "true or false"),
            user=user_of(fields),
            extra=fields,
        )

    def whole(self, turns: list[Turn]) -> Any:
        (turn,) = turns
        found = {
            **_head(turn, "chat.completion"),
            "choices": [_choice(turn, choice) for choice in turn.choices],
            "usage": usage(turns),
        }
        if turn.request.return_token_ids:
            found["prompt_token_ids"] = turn.plan.ids.tolist()
        return found

    def events(self, turns: list[Turn]) -> ChatEvents:
        (turn,) = turns
        return ChatEvents(turn)


class ChatEvents:
    """Writes chunks with deltas of the choices' messages."""

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        request = turn.request
        self._plain = request.top_logprobs is None and not request.return_token_ids
        # An event that only adds content is written around its text.
        head = orjson.dumps(_head(turn, "chat.completion.chunk"))[:-1]
        self._before_content = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (head, choice.index) for choice in turn.choices
        ]

    def opening(self) -> bytes:
        turn = self._turn
        choices = [
            {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for choice in turn.choices
        ]
        head = _head(turn, "chat.completion.chunk")
        if turn.request.return_token_ids:
            head["prompt_token_ids"] = turn.plan.ids.tolist()
        return b"".join(event({**head, "choices": [choice]}) for choice in choices)

    def delta(self, turn: Turn, choice: Choice, delta: AnswerDelta, piece: SampledChoice | None) -> bytes:
        if self._plain and delta.content and not (delta.reasoning or delta.tool_calls):
            return self._before_content[choice.index] + orjson.dumps(delta.content) + AFTER_CONTENT
        request = turn.request
        shown = piece is not None and bool(piece.ids) and (request.top_logprobs is not None or request.return_token_ids)
        if not (delta or shown):
            return b""
        said: dict[str, Any] = {}
        if delta.reasoning:
            said["reasoning_content"] = said["reasoning"] = delta.reasoning
        if delta.content:
            said["content"] = delta.content
        if delta.tool_calls:
            said["tool_calls"] = [_tool_call_delta(call) for call in delta.tool_calls]
        row: dict[str, Any] = {"index": choice.index, "delta": said, "finish_reason": None}
        if piece is not None and request.top_logprobs is not None:
            since = len(choice.ids) - len(piece.ids)
            row["logprobs"] = {"content": token_entries(choice, since, request.top_logprobs)}
        if piece is not None and request.return_token_ids:
            row["token_ids"] = piece.ids
        return event({**_head(turn, "chat.completion.chunk"), "choices": [row]})

    def closing(self) -> bytes:
        turn = self._turn
        head = _head(turn, "chat.completion.chunk")
        events = [
            event(
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
        if turn.request.include_usage:
            events.append(event({**head, "choices": [], "usage": usage([turn])}))
        return b"".join(events) + DONE

    def error(self, refusal: Refusal) -> bytes:
        return error_event(refusal)


def _messages(given: Any) -> tuple[Message, ...]:
    try:
        return read_messages(given)
    except InvalidInput as error:
        raise BadField(str(error), "messages") from None


def _head(turn: Turn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.call_id}", "object": kind, "created": turn.created, "model": turn.request.model}


def _choice(turn: Turn, choice: Choice) -> dict[str, Any]:
    request = turn.request
    found: dict[str, Any] = {
        "index": choice.index,
        "message": _message(choice.message()),
        "logprobs": None
        if request.top_logprobs is None
        else {"content": token_entries(choice, 0, request.top_logprobs)},
        "finish_reason": choice.finish_reason,
    }
    if request.return_token_ids:
        found["token_ids"] = choice.ids
    return found


def _message(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    if message.tool_calls:
        found["content"] = message.content or None
        found["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.reasoning is not None:
        found["reasoning_content"] = found["reasoning"] = message.reasoning
    return found


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_text}}


def _tool_call_delta(new: CallDelta) -> dict[str, Any]:
    """A call's id, type and name are told at its beginning, and never again: clients would append them."""
    if not new.name:
        return {"index": new.index, "function": {"arguments": new.arguments}}
    function = {"name": new.name, "arguments": new.arguments}
    return {"index": new.index, "id": new.id, "type": "function", "function": function}


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


def _take_top_logprobs(fields: dict[str, Any]) -> int | None:
    wanted = take(fields, "logprobs", bool, False, "true or false")
    top_logprobs = take(fields, "top_logprobs", int, None, "an integer")
    if top_logprobs is None:
        return 0 if wanted else None
    if not wanted and top_logprobs > 0:
        raise BadField("top_logprobs needs logprobs to be true", "top_logprobs")
    if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise BadField(f"top_logprobs is {top_logprobs}; it must lie in 0..{MAX_TOP_LOGPROBS}", "top_logprobs")
    return top_logprobs if wanted else None


# -- no route ----------------------------------------------------------------------------------------------------------


class NoDialect:
    """Answers a path that no dialect has: 404 in OpenAI's shape."""

    vendor = "A provider"

    def read(self, body: bytes) -> NoReturn:
        raise Refusal("there is no such route for a model that is recorded; see /docs", 404, code="no_route")

    def headers(self, call_id: str) -> dict[str, str]:
        return {}

    def whole(self, turns: list[Turn]) -> NoReturn:
        raise NotImplementedError

    def events(self, turns: list[Turn]) -> NoReturn:
        raise NotImplementedError

    def error(self, refusal: Refusal) -> Any:
        return error_body(refusal)
