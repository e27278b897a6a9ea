"""What every dialect says of tools: which are offered, whether they may be called, and of which one must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.data.errors import shown
from headrace.data.json import to_json
from headrace.gateway.call.ask import BadField
from headrace.tokens import Message, Request, ToolCall


class Offer(msgspec.Struct, frozen=True):
    """Tools in the form that templates know (OpenAI's chat), and how they may be used, as an `Ask` says it."""

    tools: Sequence[Mapping[str, Any]] | None = None
    calls: bool = False
    must_call: tuple[str, ...] = ()


def offer(tools: Sequence[Mapping[str, Any]] | None, choice: str, only: Sequence[Any] = ()) -> Offer:
    """Tools under a choice of `auto`, `none` or `required`: one of those that `only` names, where it names any."""
    names = tuple(tool["function"]["name"] for tool in tools or ())
    if choice == "none":
        return Offer(tools)
    if choice == "auto":
        return Offer(tools, bool(names))
    if not names:
        raise BadField("tool_choice is required, but there are no tools", "tool_choice")
    for name in only:
        if name not in names:
            raise BadField(
                f"tool_choice names {shown(name)}, which is none of tools: {', '.join(names)}", "tool_choice"
            )
    return Offer(tools, True, tuple(only) or names)


def conversation(messages: Sequence[Message], offered: Offer, options: Any, param: str) -> Request:
    """Messages, tools and template options, digested; `param` is the field that the messages came in."""
    try:
        return Request(messages, offered.tools, options)
    except RecursionError:
        raise BadField(f"{param}, tools or chat_template_kwargs are nested too deep", param) from None


def check_function(function: Any, at: str) -> None:
    """A function's name and parameters; what is wrong is named by its place."""
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadField(f"{at}.name must be a string, not {shown(name)}", "tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise BadField(f"{at}.parameters must be a JSON schema, not {shown(parameters)}", "tools")


def arguments_text(call: ToolCall) -> str:
    """A call's arguments as the text that agents are shown."""
    return call.arguments if isinstance(call.arguments, str) else to_json(call.arguments).decode()
