"""Messages in Headrace's own neutral form, and when two of them are the same.

A dialect turns its wire into `Message`s; everything behind it knows only these. Two assistant messages are the same
however an SDK re-serialised one on its way back: key order, null, missing or empty content, surrounding white space,
arguments as a string or an object, declared defaults filled into them, integers as JavaScript rounds them, reasoning
dropped or folded into the content, tool call ids renamed. An answer whose text was dropped beside its tool calls is
known by these, as long as they have the ids that they were given. What others wrote (user, system, tool) is the same
only if its text is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from math import isfinite
from typing import Any

import msgspec

from headrace.data.errors import InvalidInput, shown
from headrace.tokens.defaults import Schemas, essential, schemas_of
from headrace.tokens.images import Image, read_url

ROLES = ("system", "user", "assistant", "tool")
#: Names that other dialects and SDKs give to the roles above.
ROLE_ALIASES = {"developer": "system", "function": "tool", "ipython": "tool"}
#: Who may show images, and the types of parts that are one.
WITH_IMAGES = ("user", "tool")
IMAGE_PARTS = ("image_url", "input_image")
DIGEST = 16
ROOT = b"\0" * DIGEST

_LEADING_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call that the model asked for. `arguments` is parsed JSON, or the raw text of what is no JSON."""

    name: str
    arguments: Any = {}
    id: str = ""


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


def written(pieces: Sequence[str | Image], joiner: str = "\n") -> tuple[str, tuple[str | Image, ...]]:
    """A message's `content` and `parts` out of its pieces: texts that follow each other become one."""
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
    """Messages from the OpenAI-like dicts of a request; what is wrong is named by its place."""
    if not isinstance(raw, list | tuple) or not raw:
        raise InvalidInput(f"messages must be a list of at least one message, not {shown(raw)}")
    return tuple(item if type(item) is Message else read_message(item, f"messages[{i}]") for i, item in enumerate(raw))


def read_message(raw: Any, at: str = "message") -> Message:
    if not isinstance(raw, Mapping):
        raise InvalidInput(f"{at} must be an object with a role, not {shown(raw)}")
    role = raw.get("role")
    if isinstance(role, str):
        role = ROLE_ALIASES.get(role, role)
    if role not in ROLES:
        raise InvalidInput(f"{at}.role is {shown(role)}; it must be one of {', '.join(ROLES)}")
    content = raw.get("content")
    # Parts of one answer are pieces of one text; parts that others wrote are paragraphs, as vLLM joins them.
    text, thought, parts = _content(content, "" if role == "assistant" else "\n", f"{at}.content", role in WITH_IMAGES)
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
    """Its text, what was thought, and the parts of one with images, where it may hold `images`."""
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
    text, parts = written(pieces, joiner)
    return text, "".join(thoughts) or None, parts


def _image(part: Mapping[str, Any], at: str, *, taken: bool) -> Image:
    """An image as OpenAI's chat (`{"url": ...}`) and Responses (a URL) write it."""
    if not taken:
        raise InvalidInput(f"{at} is an image; only messages of {' and '.join(WITH_IMAGES)} may hold one")
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


class Chain:
    """Digests of a conversation's beginnings: one after every answer, and one of the whole.

    `keys[n]` stands for the first n messages. `named[n]` stands for the same where the last of them is an answer of
    tool calls alone: it names these by their ids, whatever text may have been beside them. `body(n)` stands for the
    first n without the system messages they begin with. Tool call ids otherwise count by which call they name, so that
    renaming them consistently changes nothing. `tools` are those that were offered: which arguments go without saying
    is theirs to declare.
    """

    def __init__(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.keys: dict[int, bytes] = {}
        self.named: dict[int, bytes] = {}
        self.schemas = schemas_of(tools)
        self._messages = messages
        self._hash = hasher = blake2b(digest_size=DIGEST)
        self._calls: tuple[ToolCall, ...] = ()
        for n, message in enumerate(messages, 1):
            if message.tool_calls and not answer_text(message.content):
                self.named[n] = self.naming(message)
            hasher.update(framed(canonical(message, self._calls, self.schemas)))
            if message.role == "assistant":
                self.keys[n] = hasher.copy().digest()
                self._calls = message.tool_calls
        self.whole = self.keys[len(messages)] = hasher.digest()

    def extended(self, answer: Message) -> bytes:
        """The key of the conversation with an answer to it."""
        hasher = self._hash.copy()
        hasher.update(framed(canonical(answer, self._calls, self.schemas)))
        return hasher.digest()

    def naming(self, answer: Message) -> bytes:
        """What `named` will hold of the conversation with this answer, once only its calls are left of it; empty where
        it has none, or one without an id."""
        calls = answer.tool_calls
        if not calls or not all(call.id for call in calls):
            return b""
        hasher = self._hash.copy()
        made = [[call.id, call.name, _told(call, self.schemas)] for call in calls]
        hasher.update(framed(f"named:{_json(made)}".encode("utf-8", "surrogatepass")))
        return hasher.digest()

    def answer(self, answer: Message) -> tuple[bytes, bytes, bytes]:
        """What an answer is known by: the key of the conversation with it, the digest of all that is in it, and what
        its calls name it by."""
        return self.extended(answer), strict(answer, self.schemas), self.naming(answer)

    def body(self, end: int, start: int = 0, before: bytes = ROOT, answer: Message | None = None) -> bytes:
        """The digest without the opening system messages, of the first `end` messages and perhaps an answer.

        It is chained from answer to answer, so that `before`, the body of the first `start` messages, saves their cost.
        """
        calls = self._messages[start - 1].tool_calls if start else ()
        messages = self._messages[start:end]
        if not start:
            opening = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
            messages = messages[opening:]
        run: list[bytes] = []
        for message in (*messages, answer) if answer is not None else messages:
            run.append(framed(canonical(message, calls, self.schemas)))
            if message.role == "assistant":
                before, run, calls = _digest(before, b"".join(run)), [], message.tool_calls
        return _digest(before, b"".join(run)) if run else before


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def canonical(message: Message, calls: Sequence[ToolCall], schemas: Schemas) -> bytes:
    """The bytes that two messages share if and only if they count as the same, after an assistant that made `calls`."""
    if message.role == "assistant":
        text = answer_text(message.content)
        made = [[call.name, _told(call, schemas)] for call in message.tool_calls]
        said = f"assistant:{len(text)}:{text}" + (_json(made) if made else "")
    elif message.role == "tool":
        said = f"tool:{which_call(message.tool_call_id, calls)!r}:{message.content}"
    else:
        name = message.name or ""
        said = f"{message.role}:{len(name)}:{name}{message.content}"
    if message.parts:
        said = f"parts:{_json([_shown(part) for part in message.parts])}:{said}"
    return said.encode("utf-8", "surrogatepass")


def _shown(part: str | Image) -> str | list[str]:
    """What a part is the same by: its text, or its file."""
    return part if isinstance(part, str) else [part.digest]


def strict(message: Message, schemas: Schemas) -> bytes:
    """A digest of everything in an assistant message: which of several look-alikes was meant."""
    made = [[call.name, _told(call, schemas), call.id] for call in message.tool_calls]
    thought = "-" if message.reasoning is None else f"{len(message.reasoning)}:{message.reasoning}"
    written = f"{len(message.content)}:{message.content}{thought}" + (_json(made) if made else "")
    return _digest(ROOT, written.encode("utf-8", "surrogatepass"))


def _told(call: ToolCall, schemas: Schemas) -> Any:
    """A call's arguments as far as they say something."""
    return plain(essential(call.arguments, schemas.get(call.name)))


def answer_text(content: str) -> str:
    """An answer's text without what SDKs add or lose: surrounding white space, reasoning folded into it."""
    return _LEADING_THOUGHT.sub("", content, count=1).strip()


def which_call(call_id: str | None, calls: Sequence[ToolCall]) -> int | str | None:
    """The place of the call that a tool result answers; the id itself where it names none of several."""
    for i, call in enumerate(calls):
        if call.id and call.id == call_id:
            return i
    return 0 if len(calls) == 1 else call_id


def digest_of(value: Any) -> bytes:
    """A digest of any JSON value, whatever the order of its keys. None, {} and [] are the same: nothing."""
    return _digest(ROOT, _json(plain(value)).encode()) if value else ROOT


def plain(value: Any) -> Any:
    """JSON as it survives other languages' parsers: every number is the double that is nearest to it, as JavaScript
    has no other; one that no double holds is null; one without a fraction is an integer, as far as doubles hold all."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            double = float(value)
        except OverflowError:
            return None
        if not isfinite(double):
            return None
        return int(double) if double.is_integer() and abs(double) < 2**53 else double
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(before: bytes, content: bytes) -> bytes:
    return blake2b(before + content, digest_size=DIGEST).digest()
