"""Does a rollout server speak this tokenizer's language, and which log-probs does it give? Questions and verdicts.

No I/O: the caller asks the server what `SAMPLE` becomes, and hands the answers in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from headrace.data.errors import shown
from headrace.tokens.vocabulary import Vocabulary

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
