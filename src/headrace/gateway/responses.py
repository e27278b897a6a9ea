"""Answers as JSON."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import orjson
from starlette.responses import Response

from headrace.gateway.errors import Refusal


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    try:
        data = orjson.dumps(value, default=plain, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # nested deeper than orjson writes
        data = msgspec.json.encode(value, enc_hook=plain)
    return Response(data, status, headers, "application/json")


def retry_header(refusal: Refusal) -> dict[str, str]:
    """`Retry-After`, where it is worth another try."""
    return {} if refusal.retry_after is None else {"retry-after": str(max(1, math.ceil(refusal.retry_after)))}


def refused(refusal: Refusal) -> Response:
    """A refusal on a route that speaks no dialect."""
    said: dict[str, Any] = {"detail": str(refusal)}
    if refusal.reason is not None:
        said["code"] = refusal.reason
    return json_response(said, refusal.status, retry_header(refusal))


def plain(value: Any) -> Any:
    if hasattr(value, "__struct_fields__"):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        return {"bytes": len(value)}
    raise TypeError(f"{type(value).__name__} has no JSON form")
