"""The step's check: what must hold of a call before it may be trained on.

One log-prob a sampled id; the prompt begins with its parent; the ids say what the server said. A step that fails is
quarantined with the reason, never repaired.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from headrace.data.step import FloatArray, IntArray
from headrace.tokens.history import Node
from headrace.tokens.vocabulary import Vocabulary


class Quarantine(StrEnum):
    """Why a step must not be trained on."""

    NO_TOKENS = "no_tokens"
    LOG_PROB_COUNT = "log_prob_count"
    LOG_PROB_VALUE = "log_prob_value"
    UNKNOWN_TOKEN = "unknown_token"
    PROMPT_CHANGED = "prompt_changed"
    PARENT_NOT_EXTENDED = "parent_not_extended"
    TEXT_DIFFERS = "text_differs"


#: What a float32 sum of probabilities may exceed 1 by.
ROUNDING = 1e-3


def check_step(
    vocabulary: Vocabulary,
    *,
    prompt: IntArray,
    response: IntArray,
    log_probs: FloatArray | Sequence[float] | None,
    parent: Node | None = None,
    consumed: IntArray | None = None,
    text: str | None = None,
    stop: Sequence[str] = (),
    stop_ids: frozenset[int] = frozenset(),
) -> Quarantine | None:
    """None where all is well. `consumed` are the prompt's ids as the server told them, `text` is its raw answer."""
    if not len(prompt) or not len(response):
        return Quarantine.NO_TOKENS
    if log_probs is None or len(log_probs) != len(response):
        return Quarantine.LOG_PROB_COUNT
    values = np.asarray(log_probs)
    if not (values.max() <= ROUNDING and values.min() > -np.inf):  # so that NaN fails too
        return Quarantine.LOG_PROB_VALUE
    if int(response.min()) < 0 or int(response.max()) >= vocabulary.size:
        return Quarantine.UNKNOWN_TOKEN
    if consumed is not None and not np.array_equal(consumed, prompt):
        return Quarantine.PROMPT_CHANGED
    if parent is not None:
        before = parent.whole()
        if len(prompt) <= len(before) or not np.array_equal(prompt[: len(before)], before):
            return Quarantine.PARENT_NOT_EXTENDED
    if text is not None and not same_text(vocabulary, response.tolist(), text, stop, stop_ids):
        return Quarantine.TEXT_DIFFERS
    return None


def same_text(
    vocabulary: Vocabulary,
    response: Sequence[int],
    text: str,
    stop: Sequence[str] = (),
    stop_ids: frozenset[int] = frozenset(),
) -> bool:
    """Whether ids decode to a server's raw text: special tokens shown or not, an end that the server cuts off allowed.

    A server leaves out the id that ended the turn, the stop string and what was sampled behind it, and the bytes of a
    character that never became whole.
    """
    ids = list(response)
    if ids and ids[-1] in stop_ids:
        ids = ids[:-1]
    plain = vocabulary.bytewise and vocabulary.special.isdisjoint(ids)
    if plain and vocabulary.bytes_of(ids) == text.encode("utf-8", "surrogatepass"):
        return True
    for skip in (True, False):
        whole = vocabulary.decode(ids, skip_special=skip)
        if text in (whole, whole.rstrip("\ufffd")):
            return True
        if whole.startswith(text) and any(whole.startswith(end, len(text)) for end in stop if end):
            return True
        if any(end and text.endswith(end) and whole.startswith(text) for end in stop):
            return True  # the server was asked to show the stop string
    return False
