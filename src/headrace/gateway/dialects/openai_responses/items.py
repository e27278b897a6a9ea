"""Input items into messages: what one answer was split into on its way out becomes one assistant message again.

An answer is its reasoning, its text and its calls, in a row. Reasoning begins another one unless only reasoning came
before; text does where there was text and no call yet: between two answers, a call has its output. An item of an
earlier answer may also be referred to by its id: it is then read from that answer as it was kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.data.errors import InvalidInput, shown
from headrace.gateway.call.ask import BadField
from headrace.gateway.dialects.openai_responses.fields import full_name
from headrace.gateway.dialects.openai_responses.names import ItemName
from headrace.gateway.dialects.seal import unseal
from headrace.gateway.errors import Refusal
from headrace.tokens import Message, ToolCall, read_message
from headrace.tokens.messages import read_arguments

ITEMS = "message, reasoning, function_call, function_call_output and item_reference"


def references(given: Any) -> tuple[str, ...]:
    """The calls whose answers the items of `input` refer to; the last is the one that is named last."""
    found: dict[str, None] = {}
    for at, item in enumerate(given if isinstance(given, list) else ()):
        if isinstance(item, Mapping) and _is_reference(item):
            try:
                name = _referred(item, f"input[{at}]")
            except InvalidInput as error:
                raise BadField(str(error), "input") from None
            found.pop(name.call, None)
            found[name.call] = None
    return tuple(found)


def read_input(given: Any, *, continued: bool, answers: Mapping[str, Message] | None = None) -> tuple[Message, ...]:
    """The messages of `input`. `continued`: earlier ones are known elsewhere, so an output's call may be there.

    `answers` are those that references are read from, by call; a `Refusal` names a reference to what is not there.
    Without them references are passed over, until they can be found.
    """
    if isinstance(given, str):
        return (Message("user", given),)
    if not isinstance(given, list) or not given:
        raise BadField(f"input must be a text or a list of at least one item, not {shown(given)}", "input")
    reader = _Reader(continued, answers)
    for at, item in enumerate(given):
        try:
            reader.add(item, f"input[{at}]")
        except InvalidInput as error:
            raise BadField(str(error), "input") from None
    return reader.messages()


class _Reader:
    """Items in, messages out; the answer that is being put together is kept apart until it ends."""

    def __init__(self, continued: bool, answers: Mapping[str, Message] | None) -> None:
        self._continued = continued
        self._answers = answers
        self._done: list[Message] = []
        self._reasoning: list[str] | None = None
        self._text: list[str] = []
        self._calls: list[ToolCall] = []
        self._called: set[str] = set()

    def add(self, item: Any, at: str) -> None:
        if not isinstance(item, Mapping):
            raise InvalidInput(f"{at} must be an object, not {shown(item)}")
        kind = "item_reference" if _is_reference(item) else item.get("type")
        match kind:
            case "message" | None:
                self._message(item, at)
            case "function_call":
                call_id = _text(item, "call_id", at)
                arguments = item.get("arguments")
                if not isinstance(arguments, str):
                    raise InvalidInput(f"{at}.arguments must be JSON as a string, not {shown(arguments)}")
                space = _text(item, "namespace", at) if item.get("namespace") is not None else None
                name = full_name(space, _text(item, "name", at))
                self._call(ToolCall(name, read_arguments(arguments), call_id))
            case "function_call_output":
                self._output(item, at)
            case "reasoning":
                self._think(_reasoning(item, at))
            case "item_reference":
                self._refer(_referred(item, at), at)
            case _:
                raise InvalidInput(f"{at} is an item of type {shown(kind)}; only {ITEMS} are taken")

    def messages(self) -> tuple[Message, ...]:
        self._end()
        return tuple(self._done)

    def _message(self, item: Mapping[str, Any], at: str) -> None:
        if item.get("content") is None:
            raise InvalidInput(f"{at}.content must be a text or a list of parts, not {shown(item.get('content'))}")
        message = read_message({"role": item.get("role"), "content": item["content"]}, at)
        if message.role == "tool":
            raise InvalidInput(f"{at}.role is {shown(item['role'])}; a tool's result is a function_call_output")
        if message.role != "assistant":
            self._end()
            self._done.append(message)
            return
        self._say(message.content)

    def _refer(self, name: ItemName, at: str) -> None:
        """Reads an item from the answer that it was part of."""
        if self._answers is None:
            return
        answer = self._answers.get(name.call)
        if answer is None:
            raise _not_found(name, at)
        if name.kind == "rs" and answer.reasoning is not None:
            self._think([answer.reasoning])
        elif name.kind == "msg" and name.number == 0:
            self._say(answer.content)
        elif name.kind == "msg" and name.number <= len(answer.tool_calls):
            pass  # a stream showed the text in parts, with calls between them; the first one stands for all of it
        elif name.kind == "fc" and name.number < len(answer.tool_calls):
            self._call(answer.tool_calls[name.number])
        else:
            raise _not_found(name, at)

    def _think(self, texts: list[str]) -> None:
        if self._text or self._calls:
            self._end()
        self._reasoning = [*(self._reasoning or ()), *texts]

    def _say(self, text: str) -> None:
        if self._text and not self._calls:
            self._end()
        self._text.append(text)

    def _call(self, call: ToolCall) -> None:
        self._calls.append(call)
        self._called.add(call.id)

    def _output(self, item: Mapping[str, Any], at: str) -> None:
        call_id, output = _text(item, "call_id", at), item.get("output")
        if output is None:
            raise InvalidInput(f"{at}.output must be a text or a list of parts, not null")
        if call_id not in self._called and not self._continued:
            raise InvalidInput(f"{at}.call_id is {shown(call_id)}, but no function_call before it has that call_id")
        self._end()
        self._done.append(read_message({"role": "tool", "tool_call_id": call_id, "content": output}, at))

    def _end(self) -> None:
        """The answer is whole, where there is one."""
        if self._text or self._calls or self._reasoning is not None:
            thought = "".join(self._reasoning) if self._reasoning else None
            self._done.append(Message("assistant", "".join(self._text), thought, tuple(self._calls)))
            self._reasoning, self._text, self._calls = None, [], []


def _is_reference(item: Mapping[str, Any]) -> bool:
    """Whether an item is an id alone; OpenAI's reference lets its type be left out."""
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and "role" not in item and "content" not in item)


def _referred(item: Mapping[str, Any], at: str) -> ItemName:
    given = _text(item, "id", at)
    name = ItemName.read(given)
    if name is None:
        raise _not_found(given, at)
    return name


def _not_found(name: ItemName | str, at: str) -> Refusal:
    return Refusal(
        f"{at} refers to the item {shown(str(name))}, which no answer that is stored in this trajectory holds; it was "
        "given in another, by another model, with store: false, or never. Send the item itself",
        404,
        code="item_not_found",
        param="input",
    )


def _text(item: Mapping[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{at}.{name} must be a string that is not empty, not {shown(value)}")
    return value


def _reasoning(item: Mapping[str, Any], at: str) -> list[str]:
    """What was thought, word for word: the content, else what was sealed. A summary is not what was sampled."""
    content, sealed = item.get("content"), item.get("encrypted_content")
    if item.get("summary") is not None and not isinstance(item["summary"], list):
        raise InvalidInput(f"{at}.summary must be a list, not {shown(item['summary'])}")
    if content is not None and not isinstance(content, list):
        raise InvalidInput(f"{at}.content must be a list of reasoning_text parts, not {shown(content)}")
    if sealed is not None and not isinstance(sealed, str):
        raise InvalidInput(f"{at}.encrypted_content must be a string, not {shown(sealed)}")
    texts = []
    for i, part in enumerate(content or ()):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "reasoning_text" else None
        if not isinstance(text, str):
            raise InvalidInput(f"{at}.content[{i}] must be a reasoning_text part with a text, not {shown(part)}")
        texts.append(text)
    return texts or ([_unsealed(sealed, at)] if sealed else [])


def _unsealed(sealed: str, at: str) -> str:
    reasoning = unseal(sealed)
    if reasoning is None:
        raise InvalidInput(f"{at}.encrypted_content was not made by this gateway: {shown(sealed)}")
    return reasoning
