"""Anthropic's Messages: system, messages and tools in, a message of content blocks or its events out.

Turns of one speaker that follow each other are one turn. Texts of one user's turn are paragraphs, texts of one answer
are pieces; `cache_control` and citations say nothing to a model. What cannot be rendered is refused by its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.data.errors import InvalidInput, shown
from headrace.gateway.dialects import anthropic
from headrace.gateway.dialects.anthropic import (
    RAW_ARGUMENTS,
    Json,
    MessageEvents,
    MessagesNotes,
    content_of,
    ending_of,
    message_body,
)
from headrace.gateway.dialects.shared import OfferedTools, conversation, offer_tools, unseal
from headrace.gateway.errors import Refusal
from headrace.gateway.request import BadField, CallRequest, read_fields, take, take_max_tokens, take_sampling
from headrace.gateway.turn import Turn
from headrace.tokens import Image, Message, ToolCall
from headrace.tokens.images import read_base64
from headrace.tokens.messages import join_parts


class AnthropicMessages:
    """`POST /v1/messages`, and `/v1/messages/count_tokens`."""

    vendor = "Anthropic"

    def read(self, body: bytes) -> CallRequest:
        fields = read_fields(body)
        most = take_max_tokens(fields, "max_tokens")
        if most is None:
            raise BadField("max_tokens is missing; say how many tokens an answer may have", "max_tokens")
        request = _call_request(fields)
        request.sampling["max_tokens"] = most
        return request

    def read_count(self, body: bytes) -> CallRequest:
        """A request of `count_tokens`, which needs no `max_tokens`."""
        return _call_request(read_fields(body))

    def counted(self, tokens: int) -> Any:
        return {"input_tokens": tokens}

    def headers(self, call_id: str) -> dict[str, str]:
        return anthropic.headers(call_id)

    def whole(self, turns: list[Turn]) -> Any:
        (turn,) = turns
        (choice,) = turn.choices
        return message_body(turn, content_of(turn, choice), ending_of(turn, choice))

    def events(self, turns: list[Turn]) -> MessageEvents:
        (turn,) = turns
        return MessageEvents(turn)

    def error(self, refusal: Refusal) -> Any:
        return anthropic.error_body(refusal)


def _call_request(fields: dict[str, Any]) -> CallRequest:
    refuse_unbuilt(fields)
    model = take(fields, "model", str, "default", "a string")
    messages = (*read_system(fields.pop("system", None)), *read_messages(fields.pop("messages", None)))
    offered, single_tool_call = take_tools(fields)
    thinking, notes = take_thinking(fields)
    fields["stop"] = take_stops(fields)
    sampling = take_sampling(fields)
    take_format(fields, sampling)
    options = take(fields, "chat_template_kwargs", dict, None, "an object")
    return CallRequest(
        model=model,
        conversation=conversation(messages, offered, options, "messages"),
        sampling=sampling,
        stream=take(fields, "stream", bool, False, "true or false"),
        allow_tool_calls=offered.allow_tool_calls,
        required_tools=offered.required_tools,
        single_tool_call=single_tool_call,
        thinking=thinking,
        user=take_user(fields),
        dialect_notes=notes,
    )


#: Fields that would change what is consumed or sampled in ways that are not built. Others that are not known here
#: (betas come and go) steer caches, bills and tiers, and are passed over.
NOT_OFFERED = {"mcp_servers": "tools of MCP servers", "container": "a container to run code in"}
THINKING_TYPES = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def refuse_unbuilt(fields: Json) -> None:
    """Raises `BadField` for a field that should change the answer and cannot."""
    for name, what in NOT_OFFERED.items():
        if fields.get(name):
            raise BadField(f"{name}: {what} is not offered here; leave it out", name)


def take_thinking(fields: Json) -> tuple[bool | None, MessagesNotes]:
    """Takes `thinking`: whether to reason (None where it is not said), and whether to show it."""
    given = fields.pop("thinking", None)
    if given is None:
        return None, MessagesNotes(True)
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in THINKING_TYPES:
        raise BadField(f"thinking is {shown(given)}; its type must be one of {', '.join(THINKING_TYPES)}", "thinking")
    return THINKING_TYPES[kind], MessagesNotes(given.get("display") != "omitted")


def take_stops(fields: Json) -> Any:
    """Takes `stop_sequences` out of the fields; None where there are none."""
    given = fields.pop("stop_sequences", None)
    if given is not None and not (isinstance(given, list) and all(isinstance(stop, str) and stop for stop in given)):
        raise BadField(
            f"stop_sequences must be a list of strings that are not empty, not {shown(given)}", "stop_sequences"
        )
    return given


def take_format(fields: Json, sampling: Json) -> None:
    """Takes `output_config`: its format becomes what vLLM honours. Its effort is passed over: no template knows it."""
    config = take(fields, "output_config", dict, None, "an object")
    given = (config or {}).get("format")
    if given is None:
        return
    schema = given.get("schema") if isinstance(given, dict) and given.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise BadField(
            f"output_config.format is {shown(given)}; its type must be json_schema, with a schema in it",
            "output_config",
        )
    sampling["structured_outputs"] = {"json": schema}


def take_user(fields: Json) -> str | None:
    """Takes `metadata.user_id` out of the fields: whom the agent says it works for."""
    metadata = take(fields, "metadata", dict, None, "an object")
    user: str | None = take(dict(metadata or {}), "user_id", str, None, "a string")
    return user


#: Anthropic's types of `tool_choice`, in OpenAI's words.
TOOL_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def take_tools(fields: dict[str, Any]) -> tuple[OfferedTools, bool]:
    """`tools` and `tool_choice`: the tools, how they may be used, and whether only one call may be made."""
    given, choice = fields.pop("tools", None), fields.pop("tool_choice", None)
    if given is not None and not isinstance(given, list):
        raise BadField(f"tools must be a list, not {shown(given)}", "tools")
    tools = [_tool(tool, at) for at, tool in enumerate(given or ())]
    if choice is None:
        return offer_tools(tools, "auto"), False
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        raise BadField(
            f"tool_choice is {shown(choice)}; its type must be one of {', '.join(TOOL_CHOICES)}", "tool_choice"
        )
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and type(alone) is not bool:
        raise BadField(
            f"tool_choice.disable_parallel_tool_use must be true or false, not {shown(alone)}", "tool_choice"
        )
    return offer_tools(tools, TOOL_CHOICES[kind], (choice.get("name"),) if kind == "tool" else ()), bool(alone)


def _tool(tool: Any, at: int) -> dict[str, Any]:
    """A tool as a function in OpenAI's form. What steers caching, searching and streaming is left out."""
    if not isinstance(tool, dict):
        raise BadField(f"tools[{at}] must be an object, not {shown(tool)}", "tools")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise BadField(
            f"tools[{at}] is of type {shown(kind)}, which this model does not have; offer tools with an input_schema",
            "tools",
        )
    name, schema, said = tool.get("name"), tool.get("input_schema"), tool.get("description")
    if not isinstance(name, str) or not name:
        raise BadField(f"tools[{at}].name must be a string, not {shown(name)}", "tools")
    if not isinstance(schema, dict):
        raise BadField(f"tools[{at}].input_schema must be a JSON schema, not {shown(schema)}", "tools")
    if said is not None and not isinstance(said, str):
        raise BadField(f"tools[{at}].description must be a string, not {shown(said)}", "tools")
    function: dict[str, Any] = {"name": name}
    if said is not None:
        function["description"] = said
    function["parameters"] = schema
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


#: A system block in which Claude Code writes what belongs in a header; it is no part of a prompt.
BILLING_PREFIX = "x-anthropic-billing-header:"


def read_system(given: Any) -> tuple[Message, ...]:
    """The `system` parameter as the message that a conversation begins with; none where it says nothing."""
    if given is None:
        return ()
    text = given if isinstance(given, str) else "\n".join(_system_texts(given))
    return (Message("system", text),) if text else ()


def _system_texts(given: Any) -> Iterator[str]:
    if not isinstance(given, list):
        raise BadField(f"system must be a string or a list of text blocks, not {shown(given)}", "system")
    for at, block in enumerate(given):
        text = _text(block, f"system[{at}]")
        if not text.startswith(BILLING_PREFIX):
            yield text


def read_messages(given: Any) -> list[Message]:
    """The messages of `messages`; raises `BadField` where they do not end with a user's turn."""
    if not isinstance(given, list) or not given:
        raise BadField(f"messages must be a list of at least one message, not {shown(given)}", "messages")
    found: list[Message] = []
    for at, message in enumerate(given):
        if not isinstance(message, dict):
            raise BadField(
                f"messages[{at}] must be an object with a role and content, not {shown(message)}", "messages"
            )
        role, content, place = message.get("role"), message.get("content"), f"messages[{at}].content"
        if role == "assistant":
            _append(found, _assistant_turn(content, place))
        elif role == "user":
            for each in _user_turn(content, place, found):
                _append(found, each)
        elif role == "system":
            _append(found, Message("system", "\n".join(_texts(content, place))))
        else:
            raise BadField(f"messages[{at}].role is {shown(role)}; it must be user or assistant", "messages")
    if found[-1].role == "assistant":
        raise BadField(
            "messages ends with an answer: this model does not support assistant message prefill. End the conversation "
            "with a user message",
            "messages",
        )
    return found


def _append(found: list[Message], message: Message) -> None:
    """Adds a message, to the one before it where both are of one speaker."""
    last = found[-1] if found else None
    if last is None or last.role != message.role or message.role not in ("user", "assistant"):
        found.append(message)
    elif message.role == "user":
        found[-1] = _message("user", [*_pieces(last), *_pieces(message)])
    else:
        reasoning = (last.reasoning or "") + (message.reasoning or "")
        calls = last.tool_calls + message.tool_calls
        found[-1] = Message("assistant", last.content + message.content, reasoning or None, calls)


def _message(role: str, pieces: list[str | Image], call_id: str | None = None) -> Message:
    text, parts = join_parts(pieces)
    return Message(role, text, tool_call_id=call_id, parts=parts)


def _pieces(message: Message) -> tuple[str | Image, ...]:
    return message.parts or (message.content,)


def _blocks(content: Any, place: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each block with its type and its place."""
    if not isinstance(content, list):
        raise BadField(f"{place} must be a string or a list of blocks, not {shown(content)}", "messages")
    for at, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise BadField(f"{place}[{at}] must be an object with a type, not {shown(block)}", "messages")
        yield kind, block, f"{place}[{at}]"


def _text(block: Any, place: str) -> str:
    """The text of a text block; any other is refused."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise BadField(
            f"{place} is a block of type {shown(kind)}; only text can be rendered here", place.partition("[")[0]
        )
    return _field(block, "text", place)


def _piece(kind: str, block: dict[str, Any], place: str) -> str | Image:
    """A text, or an image whose file is in the request."""
    if kind != "image":
        if kind != "text":
            raise BadField(
                f"{place} is a block of type {shown(kind)}; only text and images can be rendered", "messages"
            )
        return _field(block, "text", place)
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "base64":
        said = source.get("type") if isinstance(source, dict) else source
        raise BadField(
            f"{place}.source is {shown(said)}; nothing is fetched and no files are kept here: send the image itself as "
            "a source of type base64",
            "messages",
        )
    try:
        return read_base64(source.get("data"), f"{place}.source.data")
    except InvalidInput as error:
        raise BadField(str(error), "messages") from None


def _field(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadField(f"{place}.{name} must be a string, not {shown(value)}", place.partition("[")[0])
    return value


def _texts(content: Any, place: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(block, at) for _, block, at in _blocks(content, place)]


def _user_turn(content: Any, place: str, before: list[Message]) -> Iterator[Message]:
    """The messages of a user's turn: results of calls, and text and images between them."""
    if isinstance(content, str):
        yield Message("user", content)
        return
    pieces: list[str | Image] = []
    for kind, block, at in _blocks(content, place):
        if kind != "tool_result":
            pieces.append(_piece(kind, block, at))
            continue
        if pieces:
            yield _message("user", pieces)
            pieces = []
        call_id = _field(block, "tool_use_id", at)
        if not any(call_id == call.id for call in _open_calls(before)):
            raise BadField(
                f"{at}.tool_use_id is {shown(call_id)}, which no tool_use of the answer before has", "messages"
            )
        yield _message("tool", _result(block, at), call_id)
    if pieces or not content:
        yield _message("user", pieces)


def _open_calls(before: list[Message]) -> tuple[ToolCall, ...]:
    """The calls of the last answer."""
    return next((message.tool_calls for message in reversed(before) if message.role == "assistant"), ())


def _result(block: dict[str, Any], place: str) -> list[str | Image]:
    """The content of a tool result. An error says so in its own words; one without any becomes "Error"."""
    failed, content = block.get("is_error"), block.get("content")
    if failed is not None and type(failed) is not bool:
        raise BadField(f"{place}.is_error must be true or false, not {shown(failed)}", "messages")
    if content is None or isinstance(content, str):
        pieces: list[str | Image] = [content or ""]
    else:
        pieces = [
            # A tool that was searched for: its definition is in the prompt already, so that its name says it all.
            _field(part, "tool_name", at) if kind == "tool_reference" else _piece(kind, part, at)
            for kind, part, at in _blocks(content, f"{place}.content")
        ]
    return pieces if any(pieces) or not failed else ["Error"]


def _assistant_turn(content: Any, place: str) -> Message:
    """An earlier answer as one message: reasoning, text and calls, whatever the order of its blocks."""
    if isinstance(content, str):
        return Message("assistant", content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for kind, block, at in _blocks(content, place):
        if kind == "thinking":
            thought, sign = _field(block, "thinking", at), block.get("signature")
            thoughts.append(thought or (unseal(sign) or "" if isinstance(sign, str) else ""))
        elif kind == "redacted_thinking":
            _field(block, "data", at)  # another provider's: there is nothing in it that could be read
        elif kind == "tool_use":
            calls.append(_call(block, at))
        else:
            texts.append(_text(block, at))
    return Message("assistant", "".join(texts), "".join(thoughts) or None, tuple(calls))


def _call(block: dict[str, Any], place: str) -> ToolCall:
    given = block.get("input")
    if not isinstance(given, dict):
        raise BadField(f"{place}.input must be an object, not {shown(given)}", "messages")
    arguments = given[RAW_ARGUMENTS] if given.keys() == {RAW_ARGUMENTS} else given
    return ToolCall(_field(block, "name", place), arguments, _field(block, "id", place))
