"""Whether a text's final answer is right: by math-verify, or as a number where that can read neither side."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace.data.errors import HeadraceError
from headrace.extras import install_command
from headrace.rewards.reward_function import log

BOXED = re.compile(r"\\boxed\{([^}]+)\}")
BEHIND_HASHES = re.compile(r"####\s*(.*?)(?:\s*$|\n)")
NUMBER_BEHIND_HASHES = re.compile(r"####\s*([\d\.]+)")
THOUGHT = "</think>"
#: Seconds of processor time that math-verify may take for an answer: a busy machine makes no right answer wrong.
LIMIT_S = 5.0
#: Seconds of processor time after which a block that is over its limit, and went on, is broken off again: much longer
#: than to leave it takes.
AGAIN_S = 1.0


def is_right(content: str, gold: float | int | str, tolerance: float = 1e-6) -> bool:
    """Whether the answer in a text, in a `\\boxed{}` or after `####`, equals `gold`, which may be written so too."""
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
    """The text after `</think>`; None where it has more than `most_boxes` boxes, any of which might happen to be
    right."""
    if THOUGHT not in content:
        return content
    rest = content.split(THOUGHT)[-1]
    return None if rest.count("\\boxed") > most_boxes else rest


def _verified(content: str, gold: float | int | str) -> bool | None:
    """What math-verify says; None where one side cannot be parsed as mathematics."""
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ModuleNotFoundError as error:
        raise HeadraceError(f"this reward needs {error.name}: {install_command('envs')}") from error
    reading = LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            nits=False, malformed_operators=False, basic_latex=True, boxed="all", units=True
        ),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    unbounded: Any = None  # not by the clock: `bounded` limits CPU time
    try:
        with bounded(LIMIT_S):
            answer = parse(content, [reading], extraction_mode="first_match", parsing_timeout=unbounded)
            if not answer:
                return None
            boxed = gold if isinstance(gold, str) and "\\boxed" in gold else f"\\boxed{{{gold}}}"
            right = parse(boxed, [LatexExtractionConfig()], extraction_mode="first_match", parsing_timeout=unbounded)
            return bool(verify(answer, right, timeout_seconds=unbounded)) if right else None
    except Exception:  # its parsers and sympy raise anything over what models write
        log.warning("math-verify could not compare an answer with %r", gold, exc_info=True)
        return None


class _Over(BaseException):
    """The processor time of a block is over: no `Exception`, since parsers and sympy go on after each of those."""


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` once the process has used so much CPU time in the block, whatever exceptions are caught
    inside. Without effect outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(*_: object) -> None:
        raise _Over

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:  # what is over only here is over as well
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _Over:
        raise TimeoutError(f"it took more than {seconds:g} s of processor time") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _gold_value(gold: float | int | str) -> float | None:
    if not isinstance(gold, str):
        return gold
    return _number(gold.replace("\\boxed{", "").replace("}", "") if "\\boxed{" in gold else gold)


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "").strip())
    except ValueError:
        return None
