"""Values as JSON, for programs and people: structs by their fields, arrays as lists, bytes by their size."""

from __future__ import annotations

import os
from typing import Any

import msgspec
import orjson


def to_json(value: Any, option: int = 0) -> bytes:
    """JSON of whatever a pool holds, with keys as `text_keys` has them; `option` is orjson's."""
    try:
        return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | option)
    except TypeError:  # nested deeper than orjson writes, or of a kind that has no JSON form
        pass
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except TypeError:  # not for each: few values have such keys, and to look for them takes longer than to write most
        return msgspec.json.encode(text_keys(value), enc_hook=_plain)


def text_keys(value: Any) -> Any:
    """A value whose dicts have text for keys, as JSON's have: metadata may have any key below its top."""
    if isinstance(value, dict):
        return {_key(key): text_keys(inside) for key, inside in value.items()}
    return [text_keys(inside) for inside in value] if isinstance(value, list | tuple) else value


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    return {None: "null", True: "true", False: "false"}[key] if key is None or isinstance(key, bool) else str(key)


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
