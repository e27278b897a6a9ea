"""What `/openapi.json` and `/docs` say of each route: its body, its answers, and what it does. Nothing of it comes from
elsewhere, so that both are there without a network."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from headrace.net.front_page import links, page, table
from headrace.pool.scored.types import EnvRegistration, Registration
from headrace.version import __version__

_ROWS = {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
_REAL_ROWS = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
_MESSAGE = {"type": "object", "required": ["role", "content"], "properties": {"role": {"type": "string"}}}
GROUP: dict[str, Any] = {
    "type": "object",
    "required": ["tokens", "masks", "scores"],
    "properties": {
        "tokens": _ROWS,
        "masks": _ROWS | {"description": "-100 where a token is not trained on, else its id"},
        "scores": {"type": "array", "items": {"type": "number"}},
        "advantages": _REAL_ROWS,
        "ref_logprobs": _REAL_ROWS,
        "inference_logprobs": _REAL_ROWS | {"description": "as long as tokens, 1.0 where masked"},
        "messages": {"type": "array", "items": {"type": "array", "items": _MESSAGE}},
        "generation_params": {"type": "object"},
        "group_overrides": {"type": "object"},
        "overrides": _OBJECTS,
        "images": {},
        "env_id": {"type": "integer"},
        "distill_token_ids": {"type": "array", "items": _ROWS},
        "distill_logprobs": {"type": "array", "items": _REAL_ROWS},
    },
}
_ENV_ID = {"type": "object", "required": ["env_id"], "properties": {"env_id": {"type": "integer"}}}


def _record(kind: type, **more: Any) -> dict[str, Any]:
    """A record's JSON schema, with properties of the route beside the record's own."""
    found = msgspec.json.schema(kind)["$defs"][kind.__name__]
    return {"type": "object", "required": found["required"], "properties": found["properties"] | more}


#: By path and method: what it does, the schema of its body, and what its answer holds.
ROUTES: dict[str, dict[str, tuple[str, dict[str, Any] | None, str]]] = {
    "/": {"GET": ("Whether it is there; a page for a browser.", None, "message")},
    "/register": {
        "POST": (
            "A trainer begins; with resume its settings replace those that hold, and the queue stays.",
            _record(Registration, resume={"type": "boolean"}),
            "uuid, and a warning where earlier settings hold or what waits fits no batch",
        )
    },
    "/register-env": {
        "POST": (
            "An environment begins, once the trainer has asked for its first batch.",
            _record(EnvRegistration),
            "status, env_id, wandb_name, checkpoint_dir, starting_step, checkpoint_interval, num_steps; a warning "
            "where no batch can hold its groups",
        )
    },
    "/disconnect-env": {"POST": ("An environment ends.", _ENV_ID, "status, and error where it is unknown")},
    "/wandb_info": {"GET": ("The trainer's group and project at Weights & Biases.", None, "group, project")},
    "/info": {"GET": ("What the trainer registered.", None, "batch_size, max_token_len; -1 before it did")},
    "/batch": {"GET": ("Groups of exactly batch_size sequences, oldest first.", None, "batch: groups, or null")},
    "/latest_example": {"GET": ("The group that came into the queue last.", None, "a group, its lists empty before")},
    "/scored_data": {
        "POST": (
            "A scored group.",
            GROUP,
            "status received, or buffered with buffer_size; a warning where no batch can ever hold it",
        )
    },
    "/scored_data_list": {
        "POST": (
            "Scored groups, all of them or none.",
            {"type": "array", "items": GROUP},
            "status, groups_processed; buffered, last_buffer_size and a warning where there is cause",
        )
    },
    "/status": {
        "GET": ("The step and the queue.", None, "current_step, queue_size; dead_letters and a warning if there are")
    },
    "/status-env": {
        "GET": (
            "The same for one environment, by env_id in the query or in a body.",
            None,
            "current_step, queue_size, env_weight, unallocated_fraction, self_queue_size, max_group_size; once the "
            "trainer takes no more, ended_at, the step at which it ended, and a current_step past its last; a warning "
            "where its groups fit no batch, or wait and cannot be fetched",
        )
    },
    "/reset_data": {
        "GET": ("Forgets trainer, environments and groups.", None, "Reset successful"),
        "POST": ("Forgets trainer, environments and groups.", None, "Reset successful"),
    },
    "/metrics": {"GET": ("The numbers of its groups, for Prometheus.", None, "text")},
}
FAILURES = {
    "400": "the body is broken gzip",
    "401": "a key is needed",
    "404": "there is no such environment",
    "413": "the body is too large",
    "422": "the body is not what the route takes; detail names the field",
    "503": "no room, or the pool is away: send it again",
}


@cache
def openapi() -> dict[str, Any]:
    """The description of every route in OpenAPI 3.1; not to be changed."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace Trajectory API", "version": __version__},
        "paths": {
            path: {method.lower(): _operation(path, *about) for method, about in methods.items()}
            for path, methods in ROUTES.items()
        },
    }


def _operation(path: str, summary: str, body: dict[str, Any] | None, answer: str) -> dict[str, Any]:
    failures = {status: {"description": why} for status, why in FAILURES.items()}
    found: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": answer}, **failures}}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if path == "/status-env":
        schema = {"type": "integer"}
        found["parameters"] = [{"name": "env_id", "in": "query", "required": False, "schema": schema}]
    return found


@cache
def docs_page() -> bytes:
    """The same as a page for people."""
    rows = [
        {"route": f"{method} {path}", "what it does": summary, "body": _fields(body), "answer": answer}
        for path, methods in ROUTES.items()
        for method, (summary, body, answer) in methods.items()
    ]
    fields = [
        {"field": name, "type": _shape(schema), "": "required" if name in GROUP["required"] else ""}
        for name, schema in GROUP["properties"].items()
    ]
    failures = [{"status": status, "when": why} for status, why in FAILURES.items()]
    return page(
        "Trajectory API",
        "Every route, with its body and its answer.",
        [
            table("Routes", rows, ""),
            table("A group", fields, ""),
            table("Answers that are no 200", failures, ""),
            links("For programs", {"/openapi.json": "the same as OpenAPI 3.1"}),
        ],
    )


def _fields(body: dict[str, Any] | None) -> str:
    if body is None:
        return ""
    if body is GROUP or body.get("items") is GROUP:
        return "a group" if body is GROUP else "an array of groups"
    names = [name if name in body["required"] else f"{name}?" for name in body["properties"]]
    return ", ".join(names)


def _shape(schema: dict[str, Any]) -> str:
    kind = str(schema.get("type", "anything"))
    return f"{_shape(schema['items'])}[]" if kind == "array" else kind
