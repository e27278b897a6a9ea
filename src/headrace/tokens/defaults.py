"""Tool arguments without what goes without saying: the ones that equal what the tool declares as their default.

Agents check a call against the tool's schema and send it back with the defaults filled in. It is the same call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]


def schemas_of(tools: Sequence[Any]) -> Schemas:
    """What each tool says of its arguments, by the tool's name."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            continue
        name, schema = function.get("name"), function.get("parameters")
        if isinstance(name, str) and isinstance(schema, Mapping):
            found[name] = schema
    return found


def essential(value: Any, schema: Any) -> Any:
    """A value without the properties that equal their declared default, however deep."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, Mapping):
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return value
        return {
            key: essential(item, properties.get(key))
            for key, item in value.items()
            if not _is_default(item, properties.get(key))
        }
    if isinstance(value, list):
        items = schema.get("items")
        return [essential(item, items) for item in value] if isinstance(items, Mapping) else value
    return value


def _is_default(value: Any, schema: Any) -> bool:
    if not isinstance(schema, Mapping) or "default" not in schema:
        return False
    # JSON tells a boolean from a number, Python does not.
    default = schema["default"]
    return isinstance(value, bool) == isinstance(default, bool) and bool(value == default)
