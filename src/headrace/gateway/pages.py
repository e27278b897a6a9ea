"""What a gateway shows people: its front page, and what its OpenAPI says of each route."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request

from headrace.data.errors import HeadraceError
from headrace.gateway.access import Role
from headrace.gateway.gateway import Gateway
from headrace.gateway.upstream import PAUSE_MODES
from headrace.net.front_page import (
    KEY_NEEDED,
    channels,
    code,
    links,
    page,
    table,
    text,
)
from headrace.pool.embedded import DataPool
from headrace.pool.errors import Unauthorized

#: What every route may answer beside 200.
COMMON_ANSWERS = {
    400: "the request is wrong; the answer says what would be right",
    401: "a key is needed",
    403: "it is not open to this tenant",
    404: "there is no such thing",
    409: "it is complete, or of another channel or group",
    413: "the body is too large",
    429: "the tenant has used up its rate; `Retry-After` says when to try again",
    503: "not now; `Retry-After` says when to try again",
}
#: The same of a route that samples.
CALL_ANSWERS = {**COMMON_ANSWERS, 502: "the rollout server failed"}

_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"type": ["string", "null"]},
    },
}
_MESSAGES = {"type": "array", "minItems": 1, "items": _MESSAGE}
_ITEM = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["message", "reasoning", "function_call", "function_call_output"]},
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": {"type": ["string", "array", "null"]},
        "call_id": {"type": "string"},
        "name": {"type": "string"},
        "arguments": {"type": "string"},
        "output": {"type": "string"},
        "encrypted_content": {"type": ["string", "null"]},
    },
}
_TURN = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "enum": ["user", "assistant"]},
        "content": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
}
_ANTHROPIC: dict[str, Any] = {
    "model": {"type": "string"},
    "system": {"type": "string"},
    "messages": {"type": "array", "minItems": 1, "items": _TURN},
    "tools": {"type": "array", "items": {"type": "object"}},
    "thinking": {"type": "object"},
}
#: The body of each dialect's calls, as far as the OpenAPI shows it.
DIALECT_SCHEMAS: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "type": "object",
        "required": ["messages"],
        "properties": {
            "model": {"type": "string"},
            "messages": _MESSAGES,
            "tools": {"type": "array", "items": {"type": "object"}},
            "max_tokens": {"type": "integer", "minimum": 1},
            "temperature": {"type": "number", "minimum": 0},
            "stream": {"type": "boolean"},
        },
    },
    "/responses": {
        "type": "object",
        "required": ["input"],
        "properties": {
            "model": {"type": "string"},
            "input": {"oneOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}]},
            "instructions": {"type": ["string", "null"]},
            "previous_response_id": {"type": ["string", "null"]},
            "store": {"type": "boolean"},
            "tools": {"type": "array", "items": {"type": "object"}},
            "text": {"type": "object"},
            "reasoning": {"type": "object"},
            "include": {"type": "array", "items": {"type": "string"}},
            "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
            "max_output_tokens": {"type": "integer", "minimum": 1},
            "temperature": {"type": "number", "minimum": 0},
            "stream": {"type": "boolean"},
        },
    },
    "/messages": {
        "type": "object",
        "required": ["messages", "max_tokens"],
        "properties": {**_ANTHROPIC, "max_tokens": {"type": "integer", "minimum": 1}, "stream": {"type": "boolean"}},
    },
    "/messages/count_tokens": {"type": "object", "required": ["messages"], "properties": _ANTHROPIC},
    "/completions": {
        "type": "object",
        "required": ["prompt"],
        "properties": {
            "model": {"type": "string"},
            "prompt": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}]},
            "max_tokens": {"type": "integer", "minimum": 1},
            "temperature": {"type": "number", "minimum": 0},
            "stream": {"type": "boolean"},
        },
    },
}

LINKS = {
    "/dashboard": "figures, trajectories with their tokens, groups",
    "/docs": "every route, with its request and answer",
    "/ready": "200 once calls are taken, 503 with the reason before",
    "/health": "whether steps reach the pool",
    "/stats": "the pool's ledger and the gateway's counters",
    "/metrics": "the same for Prometheus",
    "/servers": "the rollout servers, as the gateway finds them",
    "/pool/stats": "the pool alone",
    "/status": "the Trajectory API: its step and its queue",
}


async def gateway_page(gateway: Gateway, request: Request) -> bytes:
    """What runs here. Readiness is for everyone, as `/ready` and `/health` are; servers and the pool for the admin."""
    waits, trouble = gateway.why_not_ready, gateway.trouble
    state = waits or (f"Ready, but degraded: {trouble}" if trouble else "Ready: calls are taken.")
    if waits is None and gateway.warnings:
        state = f"{state} {'; '.join(gateway.warnings)}"
    own = " and pool" if isinstance(gateway.pool, DataPool) else ""
    origin = str(request.base_url).rstrip("/")
    agents = {
        "begin a trajectory": f"curl -X POST {origin}/init_trajectory",
        "an agent's base_url": f"{origin}/TRAJECTORY/PROMPT/v1",
    }
    if gateway.settings.open:
        agents["a live service's base_url"] = f"{origin}/v1"
    sections = [code("An agent connects", agents), *await _inside(gateway, request), links("Where to look", LINKS)]
    return page(f"Gateway{own}, with the Trajectory API", state, sections, good=waits is None and trouble is None)


async def _inside(gateway: Gateway, request: Request) -> list[str]:
    try:
        gateway.access.check(request, Role.ADMIN)
    except Unauthorized:
        return [text("Rollout servers and channels", KEY_NEEDED)]
    rows = [
        {
            **{name: found[name] for name in ("address", "state", "model", "version", "in_flight", "calls")},
            "reason": found["reason"],
        }
        for found in gateway.models.servers()
    ]
    servers = table("Rollout servers", rows, "None.")
    try:
        return [servers, channels(await gateway.pool.aio.stats())]
    except HeadraceError as error:
        return [servers, text("Channels", f"The pool does not answer: {error}")]


def describe_route(
    path: str, handler: Callable[..., Any], body: type | None, *, dialect: str | None = None, aliased: bool = False
) -> dict[str, Any]:
    """The options with which FastAPI lists a route. `aliased`: the same route under another path, listed once."""
    schema = DIALECT_SCHEMAS[dialect] if dialect is not None else _schema(body) if body is not None else None
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in ("trajectory_uid", "prompt_uid")
        if f"{{{name}}}" in path
    ]
    if path == "/pause":
        modes = {"type": "string", "enum": list(PAUSE_MODES)}
        parameters.append({"name": "mode", "in": "query", "required": False, "schema": modes})
    if path in ("/pause", "/resume") or (path == "/policy_version" and body is None):
        parameters.append({"name": "model", "in": "query", "required": False, "schema": {"type": "string"}})
    if path == "/submit_steps":
        parameters.append({"name": "channel", "in": "query", "required": False, "schema": {"type": "string"}})
    extra: dict[str, Any] = {"parameters": parameters}
    if schema is not None:
        content = {"application/json": {"schema": schema}}
        extra["requestBody"] = {"required": bool(schema.get("required")), "content": content}
    answers = CALL_ANSWERS if dialect is not None or path == "/generate" else COMMON_ANSWERS
    return {
        "summary": (handler.__doc__ or path.strip("/")).strip().splitlines()[0],
        "description": "",
        "responses": {status: {"description": said} for status, said in answers.items()},
        "openapi_extra": extra,
        "response_model": None,
        "include_in_schema": not aliased,
        "name": f"{path}{' ' if aliased else ''}",
    }


def _schema(kind: type) -> dict[str, Any]:
    """A body's JSON schema in one piece."""
    found = msgspec.json.schema(kind)
    defined = found.get("$defs", {})

    def inlined(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return inlined(defined[value["$ref"].rpartition("/")[2]])
            return {key: inlined(item) for key, item in value.items() if key != "$defs"}
        return [inlined(item) for item in value] if isinstance(value, list) else value

    schema: dict[str, Any] = inlined(found)
    return schema
