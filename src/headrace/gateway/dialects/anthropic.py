"""What Anthropic's routes share: errors and events."""

from __future__ import annotations

from typing import Any

import orjson

from headrace.gateway.errors import Refusal

#: Anthropic's `type` of an error, by status. What is not here is the caller's fault below 500, and ours above.
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: The words by which agents know that they must shorten the conversation.
TOO_LONG = "prompt is too long: "


def headers(call_id: str) -> dict[str, str]:
    return {"request-id": f"req_{call_id}"}


def error_body(refusal: Refusal) -> dict[str, Any]:
    kind = KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    said = f"{TOO_LONG if refusal.reason == 'context_length_exceeded' else ''}{refusal}"
    return {"type": "error", "error": {"type": kind, "message": said}}


def event(value: dict[str, Any]) -> bytes:
    """One event; its name is its type."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), orjson.dumps(value))
