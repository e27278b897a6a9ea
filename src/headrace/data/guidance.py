"""`Guidance`: what an environment says itself about a sequence's tokens, in place of what a trainer would compute.

It comes in the fields of a scored group (Atropos' names), and travels in the metadata of the sequence's last step,
where `SCORED_GROUP` marks it: a column of a dataset that happens to have such a name is never taken for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.data.errors import shown
from headrace.data.step import FloatArray, IntArray

#: Marks the metadata of a step that was made of a scored group.
SCORED_GROUP = "scored_group"
#: The override by which an environment takes a sequence out of the policy's gradient, though its score counts.
ZERO_ADVANTAGE = "set_advantage_to_zero"
#: The fields that say something of each token.
TOKEN_FIELDS = ("advantages", "ref_logprobs", "distill_token_ids", "distill_logprobs")
#: What stands in a row of `teacher_ids` behind its last token.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True, eq=False)
class Guidance:
    """Arrays have one entry (or row) for each token of the sequence; None where the environment said nothing.

    `advantages` are used as they are. `zero_advantage`: the sequence's advantage is 0, whatever else is said.
    `ref_log_probs` are a reference's. Row t of `teacher_ids` and `teacher_log_probs` is what a teacher thinks of
    candidates for token t; it ends with `NO_TOKEN` and -inf. `misfit`: why the rest cannot be used, where that is so.
    """

    advantages: FloatArray | None = None
    zero_advantage: bool = False
    ref_log_probs: FloatArray | None = None
    teacher_ids: IntArray | None = None
    teacher_log_probs: FloatArray | None = None
    misfit: str = ""


def guidance_of(metadata: Mapping[str, Any], tokens: int) -> Guidance | None:
    """What the metadata of a sequence's last step says about its so many tokens; None where it says nothing."""
    if not metadata.get(SCORED_GROUP):
        return None
    try:
        ids, log_probs = _teacher(metadata, tokens)
        found = Guidance(
            advantages=_row(metadata, "advantages", tokens),
            zero_advantage=_is_zero(metadata.get("overrides")) or _is_zero(metadata.get("group_overrides")),
            ref_log_probs=_row(metadata, "ref_logprobs", tokens),
            teacher_ids=ids,
            teacher_log_probs=log_probs,
        )
    except ValueError as error:
        return Guidance(misfit=str(error))
    except (OverflowError, TypeError, LookupError) as error:  # a producer may have written anything into its metadata
        given = ", ".join(name for name in TOKEN_FIELDS if metadata.get(name) is not None)
        return Guidance(misfit=f"{given}: no rows of numbers that fit ({error})")
    said = (found.advantages, found.ref_log_probs, found.teacher_ids)
    return found if found.zero_advantage or any(one is not None for one in said) else None


def metadata_of(guidance: Guidance | None) -> dict[str, Any]:
    """The fields that `guidance_of` reads the same from."""
    if guidance is None:
        return {}
    found: dict[str, Any] = {"overrides": {ZERO_ADVANTAGE: True}} if guidance.zero_advantage else {}
    for name, row in (("advantages", guidance.advantages), ("ref_logprobs", guidance.ref_log_probs)):
        if row is not None:
            found[name] = row.tolist()
    if guidance.teacher_ids is not None and guidance.teacher_log_probs is not None:
        kept = guidance.teacher_ids != NO_TOKEN
        for name, rows in (
            ("distill_token_ids", guidance.teacher_ids),
            ("distill_logprobs", guidance.teacher_log_probs),
        ):
            found[name] = [row[real].tolist() for row, real in zip(rows, kept, strict=True)]
    return found


def _is_zero(overrides: Any) -> bool:
    return isinstance(overrides, Mapping) and bool(overrides.get(ZERO_ADVANTAGE))


def _row(metadata: Mapping[str, Any], name: str, tokens: int) -> FloatArray | None:
    """A number for each token; None where there are none. `ValueError` where there are more or fewer, or one is not
    finite."""
    given = metadata.get(name)
    if given is None or len(given) == 0:
        return None
    if len(given) != tokens:
        raise ValueError(f"{name} has {len(given)} entries for {tokens} tokens")
    with np.errstate(over="ignore"):
        row = np.asarray(given, np.float32)
    if row.shape != (tokens,):
        raise ValueError(f"{name} must be one number for each token, and has lists in it")
    for at in np.flatnonzero(~np.isfinite(row))[:1]:
        raise _not_finite(name, given[at], at)
    return row


def _not_finite(name: str, value: Any, at: int) -> ValueError:
    """The error for a value that would make a gradient NaN or infinite, and with it lose a whole update."""
    return ValueError(f"{name} is {shown(value)} at token {at}; it must be a finite number in float32")


def _teacher(metadata: Mapping[str, Any], tokens: int) -> tuple[IntArray, FloatArray] | tuple[None, None]:
    ids, log_probs = metadata.get("distill_token_ids"), metadata.get("distill_logprobs")
    if not ids or not log_probs:
        return None, None
    for name, rows in (("distill_token_ids", ids), ("distill_logprobs", log_probs)):
        if len(rows) != tokens:
            raise ValueError(f"{name} has {len(rows)} entries for {tokens} tokens")
    sizes = [len(row) for row in ids]
    if sizes != [len(row) for row in log_probs]:
        raise ValueError("distill_token_ids and distill_logprobs have rows of unequal lengths")
    width = max(sizes)
    if not width:
        return None, None
    found = np.full((tokens, width), NO_TOKEN, np.int32)
    probs = np.full((tokens, width), -np.inf, np.float32)
    for at in range(tokens):
        first = {token: place for place, token in reversed(list(enumerate(ids[at])))}  # a candidate counts once
        for place in sorted(first.values()):
            with np.errstate(over="ignore"):
                found[at, place], probs[at, place] = ids[at][place], log_probs[at][place]
            if found[at, place] != NO_TOKEN and not np.isfinite(probs[at, place]):
                raise _not_finite("distill_logprobs", log_probs[at][place], at)
    return found, probs
