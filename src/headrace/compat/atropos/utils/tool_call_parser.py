"""`atroposlib.utils.tool_call_parser`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

ERROR = "-ERROR-"


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """The content of the first of these tags that is there; by default of `tool_call`."""
    for tag in preferred_tags or ["tool_call"]:
        found = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        if found:
            return found.group(1).strip()
    return None


def parse_tool_call(
    response: str, available_tools: Sequence[Any] | None = None, preferred_tags: Sequence[str] | None = None
) -> tuple[str, dict[str, Any], bool]:
    """(name, arguments, is_error): an error is no call, no JSON, or an unknown tool. Single quotes count as double."""
    written = extract_tool_call(response, preferred_tags)
    if not written:
        return ERROR, {}, True
    try:
        call = json.loads(written.replace("'", '"'), strict=False)
    except json.JSONDecodeError:
        return ERROR, {}, True
    if not isinstance(call, dict):
        return ERROR, {}, True
    name, arguments = call.get("name", ""), call.get("arguments", {})
    if available_tools and name not in _names(available_tools):
        return ERROR, arguments, True
    return name, arguments, False


def _names(tools: Sequence[Any]) -> set[str]:
    named = [tool if "name" in tool else tool.get("function", {}) for tool in tools if isinstance(tool, dict)]
    return {tool["name"] for tool in named if tool.get("name")}
