"""What every dialect needs: tools that are offered, how they may be used, and sealed reasoning that agents carry."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.data.errors import shown
from headrace.gateway.request import BadField
from headrace.tokens import Conversation, Message


class OfferedTools(msgspec.Struct, frozen=True):
    """Tools in the form that templates know (OpenAI's chat), and how they may be used, as a `CallRequest` says it."""

    tools: Sequence[Mapping[str, Any]] | None = None
    allow_tool_calls: bool = False
    required_tools: tuple[str, ...] = ()


def offer_tools(tools: Sequence[Mapping[str, Any]] | None, choice: str, only: Sequence[Any] = ()) -> OfferedTools:
    """Tools under a choice of `auto`, `none` or `required`; required is one of those in `only`, where it names any.

    Raises `BadField` where a call is required of a tool that is not there."""
    names = tuple(tool["function"]["name"] for tool in tools or ())
    if choice == "none":
        return OfferedTools(tools)
    if choice == "auto":
        return OfferedTools(tools, bool(names))
    if not names:
        raise BadField("tool_choice is required, but there are no tools", "tool_choice")
    for name in only:
        if name not in names:
            raise BadField(
                f"tool_choice names {shown(name)}, which is none of tools: {', '.join(names)}", "tool_choice"
            )
    return OfferedTools(tools, True, tuple(only) or names)


def conversation(messages: Sequence[Message], offered: OfferedTools, options: Any, param: str) -> Conversation:
    """Messages, tools and template options, digested; `param` is the field that the messages came in."""
    try:
        return Conversation(messages, offered.tools, options)
    except RecursionError:
        raise BadField(f"{param}, tools or chat_template_kwargs are nested too deep", param) from None


def check_function(function: Any, at: str) -> None:
    """Raises `BadField`, naming the place `at`, where a function's name or parameters are not as they must be."""
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise BadField(f"{at}.name must be a string, not {shown(name)}", "tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise BadField(f"{at}.parameters must be a JSON schema, not {shown(parameters)}", "tools")


#: The beginning of all that is sealed here; what begins otherwise is another provider's.
SEAL_PREFIX = "headrace1."


def seal(reasoning: str) -> str:
    """Reasoning as an opaque text that agents keep and send back, where they are not shown it or might lose it."""
    return SEAL_PREFIX + base64.urlsafe_b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: str) -> str | None:
    """The reasoning; None for what was sealed elsewhere, or is broken."""
    if not sealed.startswith(SEAL_PREFIX):
        return None
    try:
        return base64.b64decode(sealed[len(SEAL_PREFIX) :], b"-_", validate=True).decode("utf-8", "surrogatepass")
    except ValueError:
        return None
