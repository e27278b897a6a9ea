"""Whether a text's final answer is the right one: by math-verify, or as a number where that can read neither."""

from __future__ import annotations

import re
import threading
from typing import Any

from headrace.data.errors import HeadraceError
from headrace.rewards.reward_function import log

BOXED = re.compile(r"\\boxed\{([^}]+)\}")
BEHIND_HASHES = re.compile(r"####\s*(.*?)(?:\s*$|\n)")
NUMBER_BEHIND_HASHES = re.compile(r"####\s*([\d\.]+)")
THOUGHT = "</think>"
#: Seconds that math-verify may take for a text. It counts them by a signal, which only a main thread can have.
TIMEOUT_S = 5


def is_right(content: str, gold: float | int | str, tolerance: float = 1e-6) -> bool:
    """The answer of a text is in a box or behind `####`; the right one may be, too, or stand for itself."""
    if isinstance(gold, str) and (hashed := BEHIND_HASHES.search(gold)):
        gold = hashed.group(1).strip()
    verified = _verified(content, gold)
    if verified is not None:
        return verified
    value = _gold_value(gold)
    if value is None:
        return False
    for pattern in (BOXED, NUMBER_BEHIND_HASHES):
        found = pattern.search(content)
        given = None if found is None else _number(found.group(1))
        if given is not None:
            return abs(given - value) < tolerance
    return False


def behind_thought(content: str, most_boxes: int) -> str | None:
    """What is behind a text's thinking; None where it is full of boxes, so that any of them might be right."""
    if THOUGHT not in content:
        return content
    rest = content.split(THOUGHT)[-1]
    return None if rest.count("\\boxed") > most_boxes else rest


def _verified(content: str, gold: float | int | str) -> bool | None:
    """What math-verify says; None where one side cannot be read as mathematics."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ModuleNotFoundError as error:
        raise HeadraceError(f"this reward needs {error.name}: pip install 'headrace[envs]'") from error
    reading = LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            nits=False, malformed_operators=False, basic_latex=True, boxed="all", units=True
        ),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    limit: Any = TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    try:
        answer = parse(content, [reading], extraction_mode="first_match", parsing_timeout=limit)
        if not answer:
            return None
        boxed = gold if isinstance(gold, str) and "\\boxed" in gold else f"\\boxed{{{gold}}}"
        right = parse(boxed, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=limit)
        return bool(verify(answer, right, timeout_seconds=limit)) if right else None
    except Exception:  # its parsers and sympy raise anything over what models write
        log.warning("math-verify could not compare an answer with %r", gold, exc_info=True)
        return None


def _gold_value(gold: float | int | str) -> float | None:
    if not isinstance(gold, str):
        return gold
    return _number(gold.replace("\\boxed{", "").replace("}", "") if "\\boxed{" in gold else gold)


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").strip())
    except ValueError:
        return None
