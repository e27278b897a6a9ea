"""What must hold before anything is trained on: of a rollout server, and of each step.

A server must tokenize as we do, and its log-probs be of a known mode. Of a step: one log-prob a sampled id; the prompt
begins with its parent; the ids say what the server said. A step that fails is quarantined with the reason, never
repaired. No I/O: the caller asks the server what `SAMPLE` becomes, and hands the answers in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Literal

import numpy as np

from headrace.data.errors import shown
from headrace.data.step import FloatArray, IntArray
from headrace.tokens.decoding import PromptIds, prompt_tail
from headrace.tokens.history import Node
from headrace.tokens.server_text import server_pieces
from headrace.tokens.stops import goes_past_stop
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
    PAST_STOP = "past_stop"


#: How far above 0 a log-prob may lie, from rounding in float32.
LOG_PROB_ROUNDING = 1e-3


def check_step(
    vocabulary: Vocabulary,
    *,
    prompt: IntArray,
    response: IntArray,
    log_probs: FloatArray | Sequence[float] | None,
    parent: Node | None = None,
    parent_ids: IntArray | None = None,
    consumed: IntArray | None = None,
    text: str | None = None,
    continued: bool = False,
    stop: Sequence[str] = (),
    min_tokens: int = 0,
    stop_ids: frozenset[int] = frozenset(),
) -> Quarantine | None:
    """Why a step must not be trained on, or None. `consumed` are the prompt's ids as the server told them, `text` its
    raw answer; either may be unknown. `parent_ids` are the parent's, where they are put together already. An answer is
    `continued` where several requests sampled it."""
    if not len(prompt) or not len(response):
        return Quarantine.NO_TOKENS
    if log_probs is None or len(log_probs) != len(response):
        return Quarantine.LOG_PROB_COUNT
    values = np.asarray(log_probs)
    if not (np.maximum.reduce(values) <= LOG_PROB_ROUNDING and np.minimum.reduce(values) > -np.inf):  # NaN fails too
        return Quarantine.LOG_PROB_VALUE
    if np.minimum.reduce(response) < 0 or np.maximum.reduce(response) >= vocabulary.size:
        return Quarantine.UNKNOWN_TOKEN
    if consumed is not None and consumed is not prompt and not np.array_equal(consumed, prompt):
        return Quarantine.PROMPT_CHANGED
    if parent is not None:
        before = parent.whole() if parent_ids is None else parent_ids
        if len(prompt) <= len(before) or not np.logical_and.reduce(prompt[: len(before)] == before):
            return Quarantine.PARENT_NOT_EXTENDED
    if text is not None and not same_text(vocabulary, response.tolist(), text, stop, stop_ids, prompt):
        return Quarantine.TEXT_DIFFERS
    if continued and stop and goes_past_stop(vocabulary, response.tolist(), stop, min_tokens, prompt):
        return Quarantine.PAST_STOP
    return None


def same_text(
    vocabulary: Vocabulary,
    response: Sequence[int],
    text: str,
    stop: Sequence[str] = (),
    stop_ids: frozenset[int] = frozenset(),
    prompt: PromptIds = (),
) -> bool:
    """Whether ids decode to a server's raw text: behind their prompt or alone, special tokens shown or not, an end that
    the server cuts off allowed.

    A server leaves out the id that ended the turn (unless it was asked to show what stopped it), the stop string and
    what was sampled behind it, and the last tokens where they end in the bytes of a character that never became whole.
    """
    ids = list(response)
    ended = bool(ids) and ids[-1] in stop_ids
    said = ids[:-1] if ended else ids
    plain = vocabulary.bytewise and vocabulary.special.isdisjoint(said)
    if plain and vocabulary.bytes_of(said) == text.encode("utf-8", "surrogatepass"):
        return True
    for whole in _decoded(vocabulary, said, prompt):
        if text == whole.rstrip("\ufffd") or _is_cut(whole, text, stop):
            return True
    return any(
        _adds_up(pieces, text, stop)
        for shown in ([said, ids] if ended else [said])
        for pieces in server_pieces(vocabulary, shown, prompt)
    )


def _decoded(vocabulary: Vocabulary, ids: list[int], prompt: PromptIds) -> Iterator[str]:
    """The text of ids at once, the likeliest way first."""
    if not vocabulary.bytewise and len(prompt):
        tail = prompt_tail(vocabulary.decode, prompt)
        before, whole = vocabulary.decode(tail), vocabulary.decode([*tail, *ids])
        if whole.startswith(before):
            yield whole[len(before) :]
        yield vocabulary.decode_after(prompt, ids)
    for skip in (True, False):
        yield vocabulary.decode(ids, skip_special=skip)


def _adds_up(pieces: Iterable[str], text: str, stop: Sequence[str]) -> bool:
    """Whether pieces are a server's text; no more of them are asked for than it takes to see that they are not."""
    said: list[str] = []
    at = 0
    for piece in pieces:
        if not piece.startswith(text[at : at + len(piece)]):
            return False
        said.append(piece)
        at += len(piece)
    return _is_cut("".join(said), text, stop)


def _is_cut(whole: str, text: str, stop: Sequence[str]) -> bool:
    """Whether a text is a whole one, or what is left of that when it is cut at a stop string, before or behind it."""
    if text == whole:
        return True
    if not whole.startswith(text):
        return False
    return any(end and (whole.startswith(end, len(text)) or text.endswith(end)) for end in stop)


#: Text in which tokenizers of different models differ: cases, digits, spaces, scripts, marks, control tokens.
SAMPLE = (
    "Headrace: don't PANIC, 1234567 naïve cafés\u2014日本語 \U0001f642\U0001f3fd  two  spaces\n\n\ttabs "
    '{"a": [true, 1.5e-3]}<think></think><tool_call></tool_call>'
)

LogProbMode = Literal["processed", "raw", "unknown"]


def tokenization_trouble(vocabulary: Vocabulary, server_ids: Sequence[int]) -> str | None:
    """Why a server's ids for `SAMPLE` (without special tokens added) are not ours; None where they are."""
    ours, theirs = vocabulary.encode(SAMPLE), list(server_ids)
    if theirs[1:] == ours and theirs and theirs[0] in vocabulary.special:
        theirs = theirs[1:]  # a server that adds a begin-of-text whatever it is told
    if theirs == ours:
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return (
        f"the server's tokenizer is another: token {at} of a sample text is {shown(theirs[at : at + 1])} there and "
        f"{shown(ours[at : at + 1])} here; give --tokenizer-path the folder of the model that the server runs"
    )


def vocabulary_trouble(vocabulary: Vocabulary, server_size: int | None) -> str | None:
    """Why a server's vocabulary cannot be ours. A model's is often padded beyond its tokenizer's, never smaller."""
    if server_size is None or server_size >= vocabulary.size:
        return None
    return f"the server's vocabulary has {server_size} tokens, the tokenizer {vocabulary.size}: it is of another model"


def log_prob_mode(
    at_one: Mapping[int, float], at_other: Mapping[int, float], temperature: float, tolerance: float = 0.02
) -> LogProbMode:
    """Which log-probs a server gives, from those of one position at temperature 1 and at another.

    Processed ones are of logits / temperature: the difference of two tokens' grows by 1 / temperature. Raw ones do not
    change. Two tokens with the same probability tell nothing.
    """
    shared = sorted(set(at_one) & set(at_other), key=lambda token: at_one[token])
    if len(shared) < 2 or temperature == 1:
        return "unknown"
    low, high = shared[0], shared[-1]
    gap, other = at_one[high] - at_one[low], at_other[high] - at_other[low]
    if gap < 5 * tolerance:
        return "unknown"
    if abs(other - gap / temperature) <= tolerance * max(1.0, 1 / temperature):
        return "processed"
    return "raw" if abs(other - gap) <= tolerance else "unknown"
