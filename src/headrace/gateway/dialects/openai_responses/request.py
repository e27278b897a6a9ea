"""A Responses request: its fields, tools and input items.

What is honoured is taken, what means nothing here is echoed, and what cannot be honoured is refused by its name.

What one answer was split into on its way out becomes one assistant message again. An answer is its reasoning, its text
and its calls, in a row. Reasoning begins another one unless only reasoning came before; text does where there was text
and no call yet: between two answers, a call has its output. Neither does where it goes on with what the same answer
thought or said before: its id names the same call, or, where agents drop ids, it begins with the line break that stands
between such parts. An item of an earlier answer may also be referred to by its id: it is then read from that answer as
it was kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.data.errors import InvalidInput, shown
from headrace.gateway.dialects import openai
from headrace.gateway.dialects.openai_responses.answer import ItemName
from headrace.gateway.dialects.shared import OfferedTools, check_function, offer_tools, unseal
from headrace.gateway.errors import Refusal
from headrace.gateway.request import BadField, take
from headrace.tokens import Message, ToolCall, read_message
from headrace.tokens.messages import read_arguments

Json = dict[str, Any]

#: Fields that would change what is consumed, sampled or kept in ways that are not built.
NOT_OFFERED = {
    "background": "answering in the background",
    "conversation": "a conversation object (use previous_response_id, or send the items)",
    "prompt": "a stored prompt",
    "context_management": "compaction by the server",
    "moderation": "moderation",
    "image": "images",
    "n": "several choices (call again)",
    "messages": "messages (use input)",
    "max_tokens": "max_tokens (use max_output_tokens)",
    "max_completion_tokens": "max_completion_tokens (use max_output_tokens)",
    "response_format": "response_format (use text.format)",
    "logprobs": "logprobs (use include: message.output_text.logprobs)",
    "reasoning_effort": "reasoning_effort (use reasoning.effort)",
}
INCLUDE_ENCRYPTED, INCLUDE_LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
#: What belongs to tools and parts that no answer here can hold: including it adds nothing.
IGNORED_INCLUDES = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
#: Stands between the parts of what a model thinks, and of what it says, in turns within one answer.
PART_BREAK = "\n"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
SUMMARIES = ("auto", "concise", "detailed")


def refuse_unbuilt(fields: Json) -> None:
    """Raises `BadField` for a field that should change the answer and cannot; drops those that change nothing."""
    for name in NOT_OFFERED.keys() & fields.keys():
        if fields.pop(name):
            raise BadField(f"{name}: {NOT_OFFERED[name]} is not offered here; leave it out", name)
    openai.refuse_unbuilt(fields)
    for name, fine in (("truncation", ("disabled",)), ("service_tier", ("auto", "default"))):
        given = fields.pop(name, None)
        if given is not None and given not in fine:
            raise BadField(f"{name} is {shown(given)}; only {' or '.join(fine)} is offered", name)


def take_offer(fields: Json) -> tuple[OfferedTools, frozenset[str]]:
    """Function tools, in the form that templates know, and the choice of them; and the namespaces that they have."""
    given = take(fields, "tools", list, [], "a list")
    tools: list[Json] = []
    namespaces = set()
    for at, tool in enumerate(given):
        if isinstance(tool, dict) and tool.get("type") == "namespace":
            name, members = tool.get("name"), tool.get("tools")
            if not isinstance(name, str) or not name or not isinstance(members, list):
                raise BadField(f"tools[{at}] must have a name and a list of tools, not {shown(tool)}", "tools")
            namespaces.add(name)
            tools += [_tool(member, f"tools[{at}].tools[{i}]", name) for i, member in enumerate(members)]
        else:
            tools.append(_tool(tool, f"tools[{at}]"))
    return _chosen(tools or None, fields.pop("tool_choice", None)), frozenset(namespaces)


def _chosen(tools: list[Json] | None, choice: Any) -> OfferedTools:
    if choice is None or choice in ("auto", "none", "required"):
        return offer_tools(tools, choice or "auto")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return offer_tools(tools, "required", (choice.get("name"),))
    if kind == "allowed_tools":
        return _allowed(tools, choice)
    raise BadField(
        f"tool_choice is {shown(choice)}; it must be auto, none, required, or an object of type function or "
        "allowed_tools",
        "tool_choice",
    )


def _tool(tool: Any, at: str, namespace: str | None = None) -> Json:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise BadField(
            f"{at} must be an object of type function, not {shown(tool)}: no other tools are offered", "tools"
        )
    check_function(tool, at)
    fields = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in fields if tool.get(name) is not None}
    function["name"] = full_name(namespace, tool["name"])
    return {"type": "function", "function": function}


def full_name(namespace: str | None, name: str) -> str:
    """What the model calls a function: those of a namespace by both names. OpenAI's names hold no dot."""
    return name if namespace is None else f"{namespace}.{name}"


def _allowed(tools: list[Json] | None, choice: Json) -> OfferedTools:
    listed, mode = choice.get("tools"), choice.get("mode")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise BadField(
            f"tool_choice is {shown(choice)}; allowed_tools has a mode, auto or required, and tools", "tool_choice"
        )
    only = [tool.get("name") if isinstance(tool, dict) else tool for tool in listed]
    found = offer_tools(tools, "required", only)
    if mode == "required":
        return found
    if set(only) != {tool["function"]["name"] for tool in tools or ()}:
        raise BadField(
            "tool_choice: with mode auto, allowed_tools that are fewer than tools cannot be enforced; send only the "
            "tools that are allowed, or use required",
            "tool_choice",
        )
    return offer_tools(tools, "auto")


def take_text(fields: Json, sampling: Json) -> Json:
    """`text`: its format becomes what the rollout server honours."""
    text = take(fields, "text", dict, {}, "an object")
    form, verbosity = text.get("format"), text.get("verbosity")
    openai.set_format(sampling, form, form, "text.format")
    if verbosity not in (None, "medium"):
        raise BadField(f"text.verbosity is {shown(verbosity)}; only medium is offered", "text.verbosity")
    return {"format": form or {"type": "text"}, "verbosity": "medium"}


def take_reasoning(fields: Json) -> Json:
    """`reasoning`: how much is up to the model, so an effort but none is a hint; what was thought is shown whole."""
    given = take(fields, "reasoning", dict, {}, "an object")
    effort, summary = given.get("effort"), given.get("summary")
    if effort is not None and effort not in EFFORTS:
        raise BadField(
            f"reasoning.effort is {shown(effort)}; it must be one of {', '.join(EFFORTS)}", "reasoning.effort"
        )
    if summary is not None and summary not in SUMMARIES:
        raise BadField(
            f"reasoning.summary is {shown(summary)}; it must be one of {', '.join(SUMMARIES)}", "reasoning.summary"
        )
    return {"effort": effort, "summary": summary}


def take_include(fields: Json) -> list[str]:
    """Takes `include`; raises `BadField` for what cannot be included."""
    include: list[str] = take(fields, "include", list, [], "a list of strings")
    for name in include:
        if name not in (INCLUDE_ENCRYPTED, INCLUDE_LOGPROBS, *IGNORED_INCLUDES):
            raise BadField(
                f"include holds {shown(name)}; {INCLUDE_ENCRYPTED} and {INCLUDE_LOGPROBS} can be included", "include"
            )
    return include


def take_top_logprobs(fields: Json, include: list[str]) -> int | None:
    """Takes `top_logprobs`: how many alternatives a token; None where no log-probs are included."""
    top_logprobs: int = take(fields, "top_logprobs", int, 0, "an integer")
    if not 0 <= top_logprobs <= openai.MAX_TOP_LOGPROBS:
        raise BadField(f"top_logprobs is {top_logprobs}; it must lie in 0..{openai.MAX_TOP_LOGPROBS}", "top_logprobs")
    if top_logprobs and INCLUDE_LOGPROBS not in include:
        raise BadField(f"top_logprobs needs include to hold {INCLUDE_LOGPROBS}", "top_logprobs")
    return top_logprobs if INCLUDE_LOGPROBS in include else None


def take_echoed(fields: Json) -> Json:
    """Takes the fields that change nothing here and are repeated in the answer."""
    metadata = take(fields, "metadata", dict, {}, "an object of strings")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise BadField(f"metadata[{shown(name)}] must be a string, not {shown(value)}", "metadata")
    names = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    for name in ("prompt_cache_options", "client_metadata", "access_programs"):
        fields.pop(name, None)
    return {
        "metadata": metadata,
        # It bounds calls of tools that the server runs itself; there are none.
        "max_tool_calls": take(fields, "max_tool_calls", int, None, "an integer"),
        "service_tier": "default",
        **{name: take(fields, name, str, None, "a string") for name in names},
    }


ITEM_TYPES = "message, reasoning, function_call, function_call_output and item_reference"


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
    """Turns items into messages; the items of one answer are collected until it ends."""

    def __init__(self, continued: bool, answers: Mapping[str, Message] | None) -> None:
        self._continued = continued
        self._answers = answers
        self._done: list[Message] = []
        self._reasoning: list[str] | None = None
        self._text: list[str] = []
        self._calls: list[ToolCall] = []
        self._called: set[str] = set()
        self._answer = ""  # the call that gave what is being put together, where an id tells

    def add(self, item: Any, at: str) -> None:
        if not isinstance(item, Mapping):
            raise InvalidInput(f"{at} must be an object, not {shown(item)}")
        kind = "item_reference" if _is_reference(item) else item.get("type")
        goes_on = self._goes_on(item)
        match kind:
            case "message" | None:
                self._message(item, at, goes_on=goes_on)
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
                self._think(_reasoning(item, at), goes_on=goes_on)
            case "item_reference":
                self._refer(_referred(item, at), at, goes_on=goes_on)
            case _:
                raise InvalidInput(f"{at} is an item of type {shown(kind)}; only {ITEM_TYPES} are taken")

    def messages(self) -> tuple[Message, ...]:
        self._end()
        return tuple(self._done)

    def _goes_on(self, item: Mapping[str, Any]) -> bool:
        """Whether an item's id says that it is of the same answer as the one before."""
        given = item.get("id")
        name = ItemName.read(given) if isinstance(given, str) else None
        before, self._answer = self._answer, "" if name is None else name.call
        return name is not None and name.call == before

    def _message(self, item: Mapping[str, Any], at: str, *, goes_on: bool) -> None:
        if item.get("content") is None:
            raise InvalidInput(f"{at}.content must be a text or a list of parts, not {shown(item.get('content'))}")
        message = read_message({"role": item.get("role"), "content": item["content"]}, at)
        if message.role == "tool":
            raise InvalidInput(f"{at}.role is {shown(item['role'])}; a tool's result is a function_call_output")
        if message.role != "assistant":
            self._end()
            self._done.append(message)
            return
        self._say(message.content, goes_on=goes_on)

    def _refer(self, name: ItemName, at: str, *, goes_on: bool) -> None:
        """Reads an item from the answer that it was part of."""
        if self._answers is None:
            return
        answer = self._answers.get(name.call)
        if answer is None:
            raise _not_found(name, at)
        if name.kind == "rs" and answer.reasoning is not None and name.number == 0:
            self._think([answer.reasoning], goes_on=goes_on)
        elif name.kind == "msg" and name.number == 0:
            self._say(answer.content, goes_on=goes_on)
        elif answer.reasoning is not None and name.kind != "fc":
            pass  # a stream showed reasoning and text in turns; the first part of each stands for all of it
        elif name.kind == "msg" and name.number <= len(answer.tool_calls):
            pass  # or the text in parts, with calls between them
        elif name.kind == "fc" and name.number < len(answer.tool_calls):
            self._call(answer.tool_calls[name.number])
        else:
            raise _not_found(name, at)

    def _think(self, texts: list[str], *, goes_on: bool) -> None:
        goes_on = goes_on or (self._reasoning is not None and "".join(texts).startswith(PART_BREAK))
        if (self._text or self._calls) and not goes_on:
            self._end()
        self._reasoning = [*(self._reasoning or ()), *texts]

    def _say(self, text: str, *, goes_on: bool) -> None:
        goes_on = goes_on or (self._reasoning is not None and text.startswith(PART_BREAK))
        if self._text and not self._calls and not goes_on:
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
        """Ends the answer that is being put together, where there is one."""
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
    """The reasoning word for word: the content, else what was sealed. A summary is not what was sampled."""
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
