"""Anthropic's `tools` and `tool_choice`: the tools as every dialect hands them on, and how an answer may use them."""

from __future__ import annotations

from typing import Any

from headrace.data.errors import shown
from headrace.gateway.call.ask import BadField
from headrace.gateway.dialects.tools import Offer, offer

#: What each type of choice is called elsewhere.
CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


def take_tools(fields: dict[str, Any]) -> tuple[Offer, bool]:
    """The tools, how they may be used, and whether only one call may be made."""
    given, choice = fields.pop("tools", None), fields.pop("tool_choice", None)
    if given is not None and not isinstance(given, list):
        raise BadField(f"tools must be a list, not {shown(given)}", "tools")
    tools = [_tool(tool, at) for at, tool in enumerate(given or ())]
    if choice is None:
        return offer(tools, "auto"), False
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str) or kind not in CHOICES:
        raise BadField(f"tool_choice is {shown(choice)}; its type must be one of {', '.join(CHOICES)}", "tool_choice")
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and type(alone) is not bool:
        raise BadField(
            f"tool_choice.disable_parallel_tool_use must be true or false, not {shown(alone)}", "tool_choice"
        )
    return offer(tools, CHOICES[kind], (choice.get("name"),) if kind == "tool" else ()), bool(alone)


def _tool(tool: Any, at: int) -> dict[str, Any]:
    """A tool as a function; what steers caching, searching and streaming is none of the model's business."""
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
