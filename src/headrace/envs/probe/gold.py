"""The right answer, where an item carries it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

#: Names that an answer goes by, the likeliest first.
NAMES = (
    "answer",
    "gold_answer",
    "correct_answer",
    "expected_answer",
    "ground_truth",
    "gold",
    "solution",
    "target",
    "expected",
    "expected_output",
    "label",
    "reference",
    "reference_answer",
    "answers",
    "secret",
    "word",
    "number",
)
#: How a worked solution marks its result.
FINAL = (
    re.compile(r"####\s*(.+?)\s*$"),
    re.compile(r"\\boxed\{([^}]+)\}"),
    re.compile(r"<answer>(.*?)</answer>", re.S),
)


def answer_of(item: Any) -> str | None:
    """The answer in an item: under a name that says so, or second in a pair of a question and an answer."""
    named = item if isinstance(item, Mapping) else getattr(item, "__dict__", None)
    if hasattr(item, "_asdict"):
        named = item._asdict()
    if named is not None:
        for name in NAMES:
            if named.get(name) not in (None, ""):
                return _text(named[name])
        nested = (answer_of(inner) for inner in named.values() if isinstance(inner, Mapping))
        return next((found for found in nested if found is not None), None)
    if isinstance(item, tuple | list) and len(item) >= 2 and not _is_chat(item):
        inside = next((found for inner in item if isinstance(inner, Mapping) and (found := answer_of(inner))), None)
        asks = isinstance(item[0], str) or _is_chat(item[0])
        return inside if inside is not None or not asks else _text(item[1])
    return None


def final(answer: str) -> str:
    """The result of a worked solution; an answer that is none stays as it is."""
    for pattern in FINAL:
        found = pattern.search(answer)
        if found:
            return found.group(1).strip()
    return answer.strip()


def _text(value: Any) -> str | None:
    if isinstance(value, list | tuple):
        return _text(value[0]) if value else None
    if isinstance(value, Mapping):
        return json.dumps(dict(value), default=str)
    return value if isinstance(value, str) else str(value)


def _is_chat(item: Any) -> bool:
    """Messages, or those that were frozen into tuples of their fields."""
    if not isinstance(item, tuple | list) or not item:
        return False
    if all(isinstance(message, tuple | frozenset) for message in item):
        return all("role" in str(message) for message in item)
    return all(isinstance(message, Mapping) and "role" in message for message in item)
