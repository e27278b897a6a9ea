"""What a request may say beside its messages and tools: what is honoured is taken, and what cannot be is refused."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.data.errors import shown
from headrace.gateway.call.ask import BadField, take

Json = dict[str, Any]

#: Fields that would change what is consumed or sampled in ways that are not built. Others that are not known here
#: (betas come and go) steer caches, bills and tiers, and are passed over.
NOT_OFFERED = {"mcp_servers": "tools of MCP servers", "container": "a container to run code in"}
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


class Notes(msgspec.Struct, frozen=True):
    """Whether an answer shows its reasoning, or only its signature."""

    show_thinking: bool


def refuse_unbuilt(fields: Json) -> None:
    for name, what in NOT_OFFERED.items():
        if fields.get(name):
            raise BadField(f"{name}: {what} is not offered here; leave it out", name)


def take_thinking(fields: Json) -> tuple[bool | None, Notes]:
    """Whether to reason, None where nothing is said of it; and whether to show it."""
    given = fields.pop("thinking", None)
    if given is None:
        return None, Notes(True)
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in THINKING:
        raise BadField(f"thinking is {shown(given)}; its type must be one of {', '.join(THINKING)}", "thinking")
    return THINKING[kind], Notes(given.get("display") != "omitted")


def take_stops(fields: Json) -> Any:
    given = fields.pop("stop_sequences", None)
    if given is not None and not (isinstance(given, list) and all(isinstance(stop, str) and stop for stop in given)):
        raise BadField(
            f"stop_sequences must be a list of strings that are not empty, not {shown(given)}", "stop_sequences"
        )
    return given


def take_format(fields: Json, sampling: Json) -> None:
    """`output_config.format`; the effort that stands beside it is nothing that a template could be told."""
    config = take(fields, "output_config", dict, None, "an object")
    given = (config or {}).get("format")
    if given is None:
        return
    schema = given.get("schema") if isinstance(given, dict) and given.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise BadField(
            f"output_config.format is {shown(given)}; its type must be json_schema, with a schema in it",
            "output_config",
        )
    sampling["structured_outputs"] = {"json": schema}


def take_user(fields: Json) -> str | None:
    metadata = take(fields, "metadata", dict, None, "an object")
    user: str | None = take(dict(metadata or {}), "user_id", str, None, "a string")
    return user
