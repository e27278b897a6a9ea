"""From rollouts to a group, and what a group must be to be sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from headrace.data.errors import InvalidInput, shown
from headrace.envs.types import ScoredDataGroup, ScoredDataItem

#: Numbers by token: every sequence of a group has them, or none has.
BY_TOKEN = ("advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids", "distill_logprobs")
#: Things of a sequence, and what stands for one that has none.
BY_SEQUENCE: dict[str, Any] = {"messages": [], "overrides": {}, "images": None}
#: Things of the whole group.
OF_GROUP = ("generation_params", "group_overrides")
#: Fields that an environment's `postprocess_histories` always finds, empty where no rollout had them.
ALWAYS = ("advantages", "ref_logprobs", "messages", "overrides", "images")


class BadGroup(InvalidInput):
    """A group that is none: it names the field."""

    code = "bad_group"


def is_item(value: Any) -> bool:
    """Whether a rollout's result is a scored item, and not something for `postprocess_histories` to make one of."""
    return isinstance(value, dict) and {"tokens", "masks", "scores"} <= value.keys()


def group_of(items: Sequence[ScoredDataItem]) -> ScoredDataGroup:
    """One group of several scored items. Every field of theirs is in it, in their order."""
    group: dict[str, Any] = {key: [item[key] for item in items] for key in ("tokens", "masks", "scores")}
    group["group_overrides"] = {}
    group.update({key: [] for key in ALWAYS})
    for key in (*BY_TOKEN, *BY_SEQUENCE):
        given = [item.get(key) for item in items]
        having = sum(value is not None for value in given)
        if not having:
            continue
        if key in BY_TOKEN and having < len(items):
            raise BadGroup(f"{key} is in {having} of {len(items)} rollouts of a group; it must be in all or none")
        group[key] = [BY_SEQUENCE.get(key) if value is None else value for value in given]
    for key in OF_GROUP:
        for item in items:
            value = item.get(key)
            if value is not None:
                group.setdefault(key, {}).update(value)
    return group  # type: ignore[return-value]


def check(group: Any, group_size: int) -> None:
    """Raises `BadGroup` for what the API would refuse, or would keep in its buffer for ever."""
    if not isinstance(group, dict):
        raise BadGroup(f"a group must be a ScoredDataGroup or None, not {type(group).__name__}: {shown(group)}")
    for key in ("tokens", "masks", "scores"):
        if _length(group.get(key)) is None:
            raise BadGroup(f"a group's {key} must be a list with an entry a sequence, not {shown(group.get(key))}")
    overrides = group.get("group_overrides") or {}
    if not isinstance(overrides, dict):
        raise BadGroup(f"a group's group_overrides must be an object, not {shown(overrides)}")
    expected = overrides.get("group_size", group_size)
    count = len(group["tokens"])
    if count != expected:
        raise BadGroup(f"a group has {count} sequences, and group_size is {expected}")
    for key in ("masks", "scores"):
        if len(group[key]) != count:
            raise BadGroup(f"a group has {count} sequences and {len(group[key])} {key}")
    for index, score in enumerate(group["scores"]):
        if not isinstance(score, Real) or not math.isfinite(score):
            raise BadGroup(f"scores[{index}] must be a finite number, not {shown(score)}")
    for index, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
        if _length(tokens) is None or _length(tokens) != _length(masks):
            raise BadGroup(f"tokens[{index}] and masks[{index}] must be lists of the same length")


def all_equal(scores: Sequence[float]) -> bool:
    """Whether a group teaches nothing: every score is the same."""
    return len(set(scores)) == 1


def _length(value: Any) -> int | None:
    """The length of a list, a tuple or an array; None of anything else."""
    return None if isinstance(value, str | bytes | dict) or not hasattr(value, "__len__") else len(value)
