"""`Conversation`: messages, tools and template options of one call, and the digests by which earlier calls are found.

Two assistant messages are the same however an SDK re-serialised one on its way back: key order, null, missing or empty
content, surrounding white space, arguments as a string or an object, declared defaults filled into them, integers as
JavaScript rounds them, reasoning dropped or folded into the content, tool call ids renamed. An answer whose text was
dropped beside its tool calls is known by these, as long as they have the ids that they were given. What others wrote
(user, system, tool) is the same only if its text is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from hashlib import blake2b
from math import isfinite
from typing import Any

from headrace.tokens.images import Image
from headrace.tokens.messages import Message, ToolCall
from headrace.tokens.partial_json import begun_object

#: Bytes of a digest: a trajectory has thousands of messages, not billions.
DIGEST_BYTES = 16
ROOT = b"\0" * DIGEST_BYTES

_LEADING_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


class Conversation:
    """What one call was made with: messages, tools and template options, digested once."""

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.messages = tuple(messages)
        self.tools = tuple(tools or ())
        self.options = dict(options or {})
        self.chain = DigestChain(self.messages, self.tools)
        self.tools_key = digest_of(list(self.tools))
        self.options_key = digest_of(self.options)

    def with_option(self, name: str, value: Any) -> Conversation:
        """The same conversation under one more template option; what it says of that one already, stays."""
        found = copy(self)
        found.options = {name: value, **self.options}
        found.options_key = digest_of(found.options)
        return found


class DigestChain:
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
        self._hash = hasher = blake2b(digest_size=DIGEST_BYTES)
        self._calls: tuple[ToolCall, ...] = ()
        self._answered = 0  # how many messages there are up to the last answer
        self._unanswered: list[bytes] = []  # those after it, as they are digested
        self._written: tuple[Message, bytes] | None = None  # an answer that was asked for, as it is digested
        for n, message in enumerate(messages, 1):
            if message.tool_calls and not answer_text(message.content):
                self.named[n] = self.naming(message)
            written = with_length(canonical_bytes(message, self._calls, self.schemas))
            hasher.update(written)
            if message.role == "assistant":
                self.keys[n] = hasher.copy().digest()
                self._calls = message.tool_calls
                self._answered, self._unanswered = n, []
            elif self._answered:
                self._unanswered.append(written)
        self.whole = self.keys[len(messages)] = hasher.digest()

    def extended(self, answer: Message) -> bytes:
        """The key of the conversation with an answer to it."""
        hasher = self._hash.copy()
        hasher.update(self._write(answer))
        return hasher.digest()

    def _write(self, answer: Message) -> bytes:
        """An answer to the conversation, as it is digested."""
        if self._written is None or self._written[0] is not answer:
            self._written = answer, with_length(canonical_bytes(answer, self._calls, self.schemas))
        return self._written[1]

    def naming(self, answer: Message) -> bytes:
        """What `named` will hold of the conversation with this answer, once only its calls are left of it; empty where
        it has none, or one without an id."""
        calls = answer.tool_calls
        if not calls or not all(call.id for call in calls):
            return b""
        hasher = self._hash.copy()
        made = [[call.id, call.name, _compared_arguments(call, self.schemas)] for call in calls]
        hasher.update(with_length(f"named:{_json(made)}".encode("utf-8", "surrogatepass")))
        return hasher.digest()

    def answer(self, answer: Message) -> tuple[bytes, bytes, bytes]:
        """What an answer is known by: the key of the conversation with it, the digest of all that is in it, and what
        its calls name it by."""
        return self.extended(answer), strict(answer, self.schemas), self.naming(answer)

    def body(self, end: int, start: int = 0, before: bytes = ROOT, answer: Message | None = None) -> bytes:
        """The digest without the opening system messages, of the first `end` messages and perhaps an answer.

        It is chained from answer to answer, so that `before`, the body of the first `start` messages, saves their cost.
        """
        if answer is not None and start and start == self._answered and end == len(self._messages):
            return _digest(before, b"".join([*self._unanswered, self._write(answer)]))
        calls = self._messages[start - 1].tool_calls if start else ()
        messages = self._messages[start:end]
        if not start:
            opening = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
            messages = messages[opening:]
        run: list[bytes] = []
        for message in (*messages, answer) if answer is not None else messages:
            run.append(with_length(canonical_bytes(message, calls, self.schemas)))
            if message.role == "assistant":
                before, run, calls = _digest(before, b"".join(run)), [], message.tool_calls
        return _digest(before, b"".join(run)) if run else before


def with_length(content: bytes) -> bytes:
    """Bytes with their length in front, so that a row of them can be told apart."""
    return len(content).to_bytes(8, "little") + content


def canonical_bytes(message: Message, calls: Sequence[ToolCall], schemas: Schemas) -> bytes:
    """The bytes that two messages share if and only if they count as the same. `calls` are those of the last answer."""
    if message.role == "assistant":
        text = answer_text(message.content)
        said = f"assistant:{len(text)}:{text}"
        if message.tool_calls:
            said += _json([[call.name, _compared_arguments(call, schemas)] for call in message.tool_calls])
    elif message.role == "tool":
        said = f"tool:{which_call(message.tool_call_id, calls)!r}:{message.content}"
    else:
        name = message.name or ""
        said = f"{message.role}:{len(name)}:{name}{message.content}"
    if message.parts:
        said = f"parts:{_json([_compared_part(part) for part in message.parts])}:{said}"
    return said.encode("utf-8", "surrogatepass")


def _compared_part(part: str | Image) -> str | list[str]:
    """What a part is compared by: its text, or its file's digest."""
    return part if isinstance(part, str) else [part.digest]


def strict(message: Message, schemas: Schemas) -> bytes:
    """A digest of everything in an assistant message, to tell answers apart that count as the same."""
    made = [[call.name, _compared_arguments(call, schemas), call.id] for call in message.tool_calls]
    thought = "-" if message.reasoning is None else f"{len(message.reasoning)}:{message.reasoning}"
    written = f"{len(message.content)}:{message.content}{thought}" + (_json(made) if made else "")
    return _digest(ROOT, written.encode("utf-8", "surrogatepass"))


def _compared_arguments(call: ToolCall, schemas: Schemas) -> Any:
    """A call's arguments as they are compared: without declared defaults, numbers as doubles. Of those that break off,
    only what is whole: some dialects' agents keep no more."""
    begun = begun_object(call.arguments) if isinstance(call.arguments, str) else None
    return portable(without_defaults(call.arguments if begun is None else begun, schemas.get(call.name)))


def answer_text(content: str) -> str:
    """An answer's text without what SDKs add or lose: surrounding white space, reasoning folded into it."""
    return (_LEADING_THOUGHT.sub("", content, count=1) if "<think>" in content else content).strip()


def which_call(call_id: str | None, calls: Sequence[ToolCall]) -> int | str | None:
    """The place of the call that a tool result answers; the id itself where it names none of several."""
    for i, call in enumerate(calls):
        if call.id and call.id == call_id:
            return i
    return 0 if len(calls) == 1 else call_id


def digest_of(value: Any) -> bytes:
    """A digest of any JSON value, whatever the order of its keys. None, {} and [] are the same."""
    return _digest(ROOT, _json(portable(value)).encode()) if value else ROOT


def portable(value: Any) -> Any:
    """A JSON value as it survives other languages' parsers: every number as the double that is nearest to it, since
    JavaScript has no other; null where no double holds it; an integer where it has no fraction and is exact."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            double = float(value)
        except OverflowError:
            return None
        if not isfinite(double):
            return None
        return int(double) if double.is_integer() and abs(double) < 2**53 else double
    if isinstance(value, Mapping):
        return {str(key): portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    return value


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(before: bytes, content: bytes) -> bytes:
    return blake2b(before + content, digest_size=DIGEST_BYTES).digest()


Schemas = Mapping[str, Mapping[str, Any]]


def schemas_of(tools: Sequence[Any]) -> Schemas:
    """The parameters' schema of each tool, by the tool's name."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            continue
        name, schema = function.get("name"), function.get("parameters")
        if isinstance(name, str) and isinstance(schema, Mapping):
            found[name] = schema
    return found


def without_defaults(value: Any, schema: Any) -> Any:
    """A value without the properties that equal their declared default, however deep.

    Agents check a call against the tool's schema and send it back with the defaults filled in: it is the same call."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, Mapping):
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return value
        return {
            key: without_defaults(item, properties.get(key))
            for key, item in value.items()
            if not _is_default(item, properties.get(key))
        }
    if isinstance(value, list):
        items = schema.get("items")
        return [without_defaults(item, items) for item in value] if isinstance(items, Mapping) else value
    return value


def _is_default(value: Any, schema: Any) -> bool:
    if not isinstance(schema, Mapping) or "default" not in schema:
        return False
    # JSON tells a boolean from a number, Python does not.
    default = schema["default"]
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)
