"""Messages in Headrace's own neutral form, and how they are read from a request.

A dialect turns its wire into `Message`s; everything behind it knows only these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.data.errors import InvalidInput, shown
from headrace.tokens.images import Image, read_url

ROLES = ("system", "user", "assistant", "tool")
#: Names that other dialects and SDKs give to the roles above.
ROLE_ALIASES = {"developer": "system", "function": "tool", "ipython": "tool"}
#: The roles whose messages may hold images, and the types of parts that are one.
IMAGE_ROLES = ("user", "tool")
IMAGE_PARTS = ("image_url", "input_image")
#: The roles of which a text alone is a whole message.
PLAIN_ROLES = ("user", "assistant", "system")


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True, eq=False):
    """One call that the model asked for. `arguments` is parsed JSON, or the raw text of what is no JSON.

    `written` is the arguments' JSON text as it was streamed, "" where they came from elsewhere. Two calls are the same
    whatever they were written like."""

    name: str
    arguments: Any = {}
    id: str = ""
    written: str = ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ToolCall):
            return NotImplemented
        return (self.name, self.arguments, self.id) == (other.name, other.arguments, other.id)

    def __hash__(self) -> int:
        return hash((self.name, self.id))

    @property
    def whole(self) -> bool:
        """Whether its arguments are JSON: a call that was cut short or left JSON cannot be carried out."""
        return not isinstance(self.arguments, str)

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON text, as it was streamed where it was."""
        if self.written or isinstance(self.arguments, str):
            return self.written or str(self.arguments)
        return json.dumps(self.arguments, ensure_ascii=False)


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message. `name` is a tool result's function, or a speaker's name. `parts` are there where it holds images:
    texts and images in their order, of which `content` is the text alone."""

    role: str
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    parts: tuple[str | Image, ...] = ()


class Unrenderable(InvalidInput):
    """Messages that the model's template cannot write; the message says why, in the template's own words."""

    code = "unrenderable"


def images_of(messages: Sequence[Message]) -> list[Image]:
    """The images of messages, in their order."""
    return [part for message in messages for part in message.parts if isinstance(part, Image)]


def join_parts(pieces: Sequence[str | Image], joiner: str = "\n") -> tuple[str, tuple[str | Image, ...]]:
    """A message's `content` and `parts` out of its pieces; texts that follow each other become one."""
    parts: list[str | Image] = []
    for piece in pieces:
        last = parts[-1] if parts else None
        if isinstance(piece, str) and isinstance(last, str):
            parts[-1] = last + joiner + piece
        else:
            parts.append(piece)
    text = "".join(part for part in parts if isinstance(part, str))
    return text, tuple(parts) if any(isinstance(part, Image) for part in parts) else ()


def read_messages(raw: Any) -> tuple[Message, ...]:
    """Messages from the OpenAI-like dicts of a request; raises `InvalidInput`, naming the place of what is wrong."""
    if not isinstance(raw, list | tuple) or not raw:
        raise InvalidInput(f"messages must be a list of at least one message, not {shown(raw)}")
    found: list[Message] = []
    for i, item in enumerate(raw):
        found.append(_plain_message(item) or (item if type(item) is Message else read_message(item, f"messages[{i}]")))
    return tuple(found)


def _plain_message(raw: Any) -> Message | None:
    """A message that has nothing but a role and a text, as most have; None where `read_message` must look."""
    if type(raw) is dict and len(raw) == 2:
        role, content = raw.get("role"), raw.get("content")
        if type(content) is str and role in PLAIN_ROLES:
            return Message(role, content)
    return None


def read_message(raw: Any, at: str = "message") -> Message:
    """One message from an OpenAI-like dict; raises `InvalidInput`, naming the place of what is wrong."""
    if not isinstance(raw, Mapping):
        raise InvalidInput(f"{at} must be an object with a role, not {shown(raw)}")
    role = raw.get("role")
    if isinstance(role, str):
        role = ROLE_ALIASES.get(role, role)
    if role not in ROLES:
        raise InvalidInput(f"{at}.role is {shown(role)}; it must be one of {', '.join(ROLES)}")
    content = raw.get("content")
    # Parts of one answer are pieces of one text; parts that others wrote are paragraphs, as vLLM joins them.
    text, thought, parts = _content(content, "" if role == "assistant" else "\n", f"{at}.content", role in IMAGE_ROLES)
    name = _text(raw.get("name"), f"{at}.name")
    if role != "assistant":
        call_id = _text(raw.get("tool_call_id"), f"{at}.tool_call_id") if role == "tool" else None
        return Message(role, text, None, (), call_id, name, parts)
    reasoning = raw.get("reasoning_content")
    if reasoning is None:
        reasoning = raw.get("reasoning")
    if not isinstance(reasoning, str):  # providers put objects here too; only text is ever rendered
        reasoning = thought
    calls = raw.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise InvalidInput(f"{at}.tool_calls must be a list, not {shown(calls)}")
    return Message(
        role, text, reasoning, tuple(_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)), None, name
    )


def _text(value: Any, at: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"{at} must be a string, not {shown(value)}")
    return value


def _content(content: Any, joiner: str, at: str, images: bool) -> tuple[str, str | None, tuple[str | Image, ...]]:
    """A content's text, its reasoning, and the parts of one with images; these are refused unless `images`."""
    if isinstance(content, str):
        return content, None, ()
    if content is None:
        return "", None, ()
    if not isinstance(content, list | tuple):
        raise InvalidInput(f"{at} must be a string or a list of parts, not {shown(content)}")
    pieces: list[str | Image] = []
    thoughts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text" if isinstance(part, str) else None
        if kind in ("thinking", "reasoning") and isinstance(part, Mapping):
            thoughts.append(str(part.get("thinking") or part.get("text") or ""))
            continue
        if kind in IMAGE_PARTS and isinstance(part, Mapping):
            pieces.append(_image(part, f"{at}[{i}]", taken=images))
            continue
        value = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(value, str):
            what = "only text and image parts" if images else "only text parts"
            raise InvalidInput(f"{at}[{i}] is a part of type {shown(kind)}; {what} can be rendered")
        pieces.append(value)
    text, parts = join_parts(pieces, joiner)
    return text, "".join(thoughts) or None, parts


def _image(part: Mapping[str, Any], at: str, *, taken: bool) -> Image:
    """An image as OpenAI's chat (`{"url": ...}`) and Responses (a URL) write it."""
    if not taken:
        raise InvalidInput(f"{at} is an image; only messages of {' and '.join(IMAGE_ROLES)} may hold one")
    given = part.get("image_url")
    if given is None and part.get("file_id") is not None:
        raise InvalidInput(f"{at}.file_id: files are not kept here; send the image itself as a data: URL in image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    return read_url(url, f"{at}.image_url")


def _call(raw: Any, at: str) -> ToolCall:
    if not isinstance(raw, Mapping):
        raise InvalidInput(f"{at} must be an object, not {shown(raw)}")
    function = raw.get("function")
    if not isinstance(function, Mapping):
        function = raw
    name = function.get("name")
    if not isinstance(name, str):
        raise InvalidInput(f"{at}.function.name must be a string, not {shown(name)}")
    return ToolCall(name, read_arguments(function.get("arguments")), _text(raw.get("id"), f"{at}.id") or "")


def read_arguments(raw: Any) -> Any:
    """Arguments as parsed JSON; text that is no JSON stays text, nothing given is no arguments."""
    if raw is None or raw == "":
        return {}
    if not isinstance(raw, str):
        return raw
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw


def to_dict(message: Message) -> dict[str, Any]:
    """The message as chat templates expect it: arguments as objects, nothing that is absent."""
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        out["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in message.parts
        ]
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out
