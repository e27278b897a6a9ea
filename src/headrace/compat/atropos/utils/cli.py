"""`atroposlib.utils.cli`: what environments use of it. The command line itself is `headrace.envs.cli`."""

from __future__ import annotations

import sys
from typing import Any

from pydantic import BaseModel


def merge_dicts(*dicts: dict[str, Any]) -> dict[str, Any]:
    """Merges dictionaries, nested ones too; later values override earlier ones."""
    merged: dict[str, Any] = {}
    for one in dicts:
        for key, value in one.items():
            old = merged.get(key)
            merged[key] = merge_dicts(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def extract_namespace(model: Any, prefix: str) -> dict[str, Any]:
    """The entries of a model or a dictionary whose names begin with the prefix, without it."""
    data = model.model_dump() if isinstance(model, BaseModel) else model
    if not isinstance(data, dict):
        raise TypeError(f"{type(model).__name__} is neither a pydantic model nor a dict")
    return {key.removeprefix(prefix): value for key, value in data.items() if key.startswith(prefix)}


def get_double_dash_flags() -> dict[str, Any]:
    """The flags of this process's command line: `--key=value`, `--key value`, or `--key` alone, which is True."""
    flags: dict[str, Any] = {}
    args = sys.argv[1:]
    for at, arg in enumerate(args):
        if not arg.startswith("--"):
            continue
        key, equals, value = arg[2:].partition("=")
        following = args[at + 1] if at + 1 < len(args) else "-"
        if key:
            given: Any = value if equals else True if following.startswith("-") else following
            flags[key] = None if given == "None" else given
    return flags
