"""Scored groups as Steps, and Sequences as scored groups: so that any producer feeds any consumer.

The convention of both: `masks` are labels, -100 where a token is not trained on, else its id; `inference_logprobs` has
an entry for each token, 1.0 where it is masked.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import groupby
from typing import Any

import numpy as np
import orjson

from headrace.data.errors import InvalidInput
from headrace.data.guidance import SCORED_GROUP, metadata_of
from headrace.data.scored.piece import Piece, ScoredGroup, decode, deflate
from headrace.data.scored.read import KEYS
from headrace.data.sequence import Sequence
from headrace.data.step import Step

MASKED_LABEL = -100
MASKED_LOG_PROB = 1.0
#: Fields with an entry for each sequence; the other optional ones are the group's.
_PER_SEQUENCE = ("advantages", "ref_logprobs", "messages", "overrides", "distill_token_ids", "distill_logprobs")
#: Those of which a trainer makes use (`headrace.data.guidance`).
_GUIDANCE = ("advantages", "ref_logprobs", "overrides", "distill_token_ids", "distill_logprobs")
_PER_GROUP = ("generation_params", "group_overrides", "images", "env_id")


def to_steps(piece: Piece, prompt_uid: str) -> list[Step]:
    """The group as the steps of one trajectory a sequence, `<prompt_uid>-<n>`.

    Every run of trained tokens is a step, and its prompt is whatever stands before it: the first token of a sequence is
    therefore always context. The score is the last step's reward, and what else the environment sent is its metadata,
    marked by `scored_group`.
    A sequence that trains nothing is one step that is not trainable, so that its score still counts in its group.
    `InvalidInput` where a sequence has fewer than two tokens, or one that is no int32: those are no steps.
    """
    group = decode(piece)
    return [step for n in range(len(group["tokens"])) for step in _trajectory(group, n, prompt_uid)]


def from_sequences(sequences: Many[Sequence], env_id: int | None = None) -> ScoredGroup:
    """Sequences as a scored group: a score is the trajectory's reward, 0 where none was given.

    Where a trained token's log-prob was not recorded, the group has no `inference_logprobs`: an entry has no null.
    """
    if not sequences:
        raise InvalidInput("sequences is empty; a group has at least one sequence")
    probs = [np.where(one.loss_mask, one.log_probs, np.float32(MASKED_LOG_PROB)) for one in sequences]
    known = all(bool(np.isfinite(row).all()) for row in probs)
    fields: dict[str, Any] = dict.fromkeys(KEYS)
    fields |= {
        "tokens": [one.tokens for one in sequences],
        "masks": [np.where(one.loss_mask, one.tokens, np.int32(MASKED_LABEL)) for one in sequences],
        "scores": [0.0 if one.reward is None else float(one.reward) for one in sequences],
        "inference_logprobs": probs if known else None,
        "env_id": env_id,
    }
    said = [metadata_of(one.guidance) for one in sequences]
    for key in _GUIDANCE:
        if any(key in one for one in said):
            fields[key] = [one.get(key, {} if key == "overrides" else []) for one in said]
    return ScoredGroup(deflate(orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)), len(sequences), env_id)


def _trajectory(group: dict[str, Any], n: int, prompt_uid: str) -> list[Step]:
    tokens = group["tokens"][n]
    if len(tokens) < 2:
        raise InvalidInput(f"tokens[{n}] has {len(tokens)} entries; a step has at least a prompt and a response")
    probs = group["inference_logprobs"][n] if _has(group["inference_logprobs"], n) else []
    spans = _runs(group["masks"][n])
    trainable = bool(spans)
    spans = spans or [(len(tokens) - 1, len(tokens))]
    last = len(spans) - 1
    return [
        Step(
            prompt_ids=tokens[:start],
            response_ids=tokens[start:end],
            rollout_log_probs=probs[start:end] if trainable and len(probs) == len(tokens) else None,
            trajectory_uid=f"{prompt_uid}-{n}",
            prompt_uid=prompt_uid,
            step_index=index,
            is_last=index == last,
            reward=group["scores"][n] if index == last else None,
            metadata=_rest(group, n) if index == last else {},
            trainable=trainable,
        )
        for index, (start, end) in enumerate(spans)
    ]


def _runs(masks: list[int]) -> list[tuple[int, int]]:
    """Where trained tokens stand, from the second token on."""
    runs = []
    for trained, places in groupby(range(1, len(masks)), lambda at: masks[at] != MASKED_LABEL):
        if trained:
            found = list(places)
            runs.append((found[0], found[-1] + 1))
    return runs


def _rest(group: dict[str, Any], n: int) -> dict[str, Any]:
    own = {key: group[key][n] for key in _PER_SEQUENCE if _has(group[key], n)}
    shared = {key: group[key] for key in _PER_GROUP if group[key] is not None}
    return {SCORED_GROUP: True} | {key: _packable(value) for key, value in (own | shared).items()}


def _has(rows: list[Any] | None, n: int) -> bool:
    return rows is not None and n < len(rows)


def _packable(value: Any) -> Any:
    """Metadata travels in a form whose integers have 64 bits; larger ones become floats, or text."""
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return float(value) if abs(value) < 1e308 else str(value)
    if isinstance(value, list):
        return [_packable(item) for item in value]
    if isinstance(value, dict):
        return {key: _packable(item) for key, item in value.items()}
    return value
