"""What must hold of a group, each in one function that says what does not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.data.errors import shown
from headrace.envs.groups import BY_TOKEN, check_group

MASKED = -100
#: What a float32 sum of probabilities may exceed 1 by.
ROUNDING = 1e-3


def shape(group: dict[str, Any], group_size: int) -> None:
    """One entry a sequence, and numbers where numbers belong."""
    check_group(group, group_size)
    count = len(group["tokens"])
    for at, tokens in enumerate(group["tokens"]):
        assert len(tokens), f"tokens[{at}] is empty"
        wrong = next((token for token in tokens if isinstance(token, bool) or not _is_id(token)), None)
        assert wrong is None, f"tokens[{at}] holds {shown(wrong)}, which is no token id"
    for key in ("messages", "overrides", "images", *BY_TOKEN):
        value = group.get(key)
        if value is not None and len(value):
            assert len(value) == count, f"{key} has {len(value)} entries for {count} sequences"
    for at, chat in enumerate(group.get("messages") or ()):
        for message in chat:
            assert {"role", "content"} <= set(message), (
                f"messages[{at}] holds {shown(message)}, without role or content"
            )


def masks(tokens: Sequence[int], labels: Sequence[int], at: int) -> None:
    """A label is its token, or -100; something is trained on, but not the first token, which nothing comes before."""
    for place, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        assert label in (token, MASKED), (
            f"masks[{at}][{place}] is {label}; it must be the token, {token}, or -100 where that is not trained on"
        )
    assert any(label != MASKED for label in labels), f"masks[{at}] is -100 throughout: nothing is trained on"
    assert labels[0] == MASKED, f"masks[{at}][0] is trained on: a prompt comes before what the model says"


def roles(tokens: Sequence[int], labels: Sequence[int], at: int, tokenizer: Any, said: Sequence[str]) -> None:
    """Every run of trained tokens is the text of an answer, or a part of one; marks of a turn's end may be with it."""
    pairs = zip(tokens, labels, strict=True)
    for trained, run in itertools.groupby(pairs, key=lambda pair: pair[1] != MASKED):
        if not trained:
            continue
        text = tokenizer.decode([int(token) for token, _ in run], skip_special_tokens=True).strip()
        assert any(text in answer for answer in said), (
            f"sequence {at} is trained on {shown(text)}, which the model did not say; mask what others said with -100"
        )


def log_probs(group: dict[str, Any]) -> None:
    """Numbers by token are as long as the tokens; those of sampling are 1.0 where masked, and log-probs elsewhere."""
    for key in BY_TOKEN:
        for at, values in enumerate(group.get(key) or ()):
            length = len(group["tokens"][at])
            assert len(values) == length, f"{key}[{at}] has {len(values)} entries for {length} tokens"
    for at, values in enumerate(group.get("inference_logprobs") or ()):
        for place, (value, label) in enumerate(zip(values, group["masks"][at], strict=True)):
            if label == MASKED:
                assert value == 1.0, f"inference_logprobs[{at}][{place}] is {value}; it must be 1.0 where it is masked"
            else:
                assert -math.inf < value <= ROUNDING, (
                    f"inference_logprobs[{at}][{place}] is {value}, which is no log-prob of a token that is trained on"
                )


def plain(value: Any) -> Any:
    """Something to compare by value, arrays included."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _is_id(token: Any) -> bool:
    return isinstance(token, int | np.integer) and int(token) >= 0
