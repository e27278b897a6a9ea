"""Answers as JSON."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import Response

from headrace.data.json import to_json
from headrace.gateway.errors import Refusal


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


def retry_header(refusal: Refusal) -> dict[str, str]:
    """`Retry-After`, where it is worth another try."""
    return {} if refusal.retry_after is None else {"retry-after": str(max(1, math.ceil(refusal.retry_after)))}


def refused(refusal: Refusal) -> Response:
    """A refusal on a route that speaks no dialect."""
    said: dict[str, Any] = {"detail": str(refusal)}
    if refusal.reason is not None:
        said["code"] = refusal.reason
    return json_response(said, refusal.status, retry_header(refusal))
