"""Anthropic's messages into Headrace's: content blocks, calls and their results, by the rules of that API.

Turns of one speaker that follow each other are one turn. Texts of one user's turn are paragraphs, texts of one answer
are pieces; `cache_control` and citations say nothing to a model. What cannot be rendered is refused by its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.data.errors import InvalidInput, shown
from headrace.gateway.call.ask import BadField
from headrace.gateway.dialects.seal import unseal
from headrace.tokens import Image, Message, ToolCall
from headrace.tokens.images import read_base64
from headrace.tokens.messages import written

#: A system block in which Claude Code writes what belongs in a header; it is no part of a prompt.
BILLING = "x-anthropic-billing-header:"
#: The one key under which a call's arguments are shown that are no JSON object, as Anthropic's must be.
RAW = "_raw"


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
        if not text.startswith(BILLING):
            yield text


def read_messages(given: Any) -> list[Message]:
    """The conversation that `messages` are; it ends with what is to be answered."""
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
            _append(found, _answer(content, place))
        elif role == "user":
            for each in _said(content, place, found):
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
    text, parts = written(pieces)
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


def _said(content: Any, place: str, before: list[Message]) -> Iterator[Message]:
    """What a user's turn holds: results of calls, text and images."""
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
    """What a result holds. That it is an error is for it to say; where there is nothing, it is said here."""
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


def _answer(content: Any, place: str) -> Message:
    """An answer as it was given: reasoning, text and calls, whatever the order of its blocks."""
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
    arguments = given[RAW] if given.keys() == {RAW} else given
    return ToolCall(_field(block, "name", place), arguments, _field(block, "id", place))
