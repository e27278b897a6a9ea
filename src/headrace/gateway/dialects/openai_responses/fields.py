"""What a request may say beside its items: what is honoured is taken, what means nothing here is echoed, and what
cannot be honoured is refused by its name."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.data.errors import shown
from headrace.gateway.call.ask import BadField, take
from headrace.gateway.dialects import openai
from headrace.gateway.dialects.tools import Offer, check_function, offer

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
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
#: What belongs to tools and parts that no answer here can hold: including it adds nothing.
INCLUDED = (
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
SUMMARIES = ("auto", "concise", "detailed")


class Notes(msgspec.Struct, frozen=True):
    """What an answer says again of its request, the namespaces of its tools, and whether reasoning is also sealed."""

    echo: Json
    namespaces: frozenset[str]
    seal: bool


def refuse_unbuilt(fields: Json) -> None:
    for name in NOT_OFFERED.keys() & fields.keys():
        if fields.pop(name):
            raise BadField(f"{name}: {NOT_OFFERED[name]} is not offered here; leave it out", name)
    openai.refuse_unbuilt(fields)
    for name, fine in (("truncation", ("disabled",)), ("service_tier", ("auto", "default"))):
        given = fields.pop(name, None)
        if given is not None and given not in fine:
            raise BadField(f"{name} is {shown(given)}; only {' or '.join(fine)} is offered", name)


def take_offer(fields: Json) -> tuple[Offer, frozenset[str]]:
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


def _chosen(tools: list[Json] | None, choice: Any) -> Offer:
    if choice is None or choice in ("auto", "none", "required"):
        return offer(tools, choice or "auto")
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return offer(tools, "required", (choice.get("name"),))
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


def _allowed(tools: list[Json] | None, choice: Json) -> Offer:
    listed, mode = choice.get("tools"), choice.get("mode")
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise BadField(
            f"tool_choice is {shown(choice)}; allowed_tools has a mode, auto or required, and tools", "tool_choice"
        )
    only = [tool.get("name") if isinstance(tool, dict) else tool for tool in listed]
    found = offer(tools, "required", only)
    if mode == "required":
        return found
    if set(only) != {tool["function"]["name"] for tool in tools or ()}:
        raise BadField(
            "tool_choice: with mode auto, allowed_tools that are fewer than tools cannot be enforced; send only the "
            "tools that are allowed, or use required",
            "tool_choice",
        )
    return offer(tools, "auto")


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
    include: list[str] = take(fields, "include", list, [], "a list of strings")
    for name in include:
        if name not in (ENCRYPTED, LOGPROBS, *INCLUDED):
            raise BadField(f"include holds {shown(name)}; {ENCRYPTED} and {LOGPROBS} can be included", "include")
    return include


def take_tops(fields: Json, include: list[str]) -> int | None:
    tops: int = take(fields, "top_logprobs", int, 0, "an integer")
    if not 0 <= tops <= openai.MAX_TOPS:
        raise BadField(f"top_logprobs is {tops}; it must lie in 0..{openai.MAX_TOPS}", "top_logprobs")
    if tops and LOGPROBS not in include:
        raise BadField(f"top_logprobs needs include to hold {LOGPROBS}", "top_logprobs")
    return tops if LOGPROBS in include else None


def take_echoed(fields: Json) -> Json:
    """What means nothing here, and is said again as it was."""
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
