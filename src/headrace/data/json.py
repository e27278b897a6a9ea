"""Values as JSON, for programs and people: structs by their fields, arrays as lists, bytes by their size."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import orjson


def to_json(value: Any, option: int = 0) -> bytes:
    """JSON of whatever a pool holds; `option` is orjson's."""
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | option)
    except TypeError:  # nested deeper than orjson writes, or of a kind that has no JSON form
        return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "__struct_fields__"):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        return {"bytes": len(value)}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
