"""From one item's rollouts to a group: rollouts run concurrently, are retried and merged, and groups are validated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from numbers import Real
from typing import Any, TypeVar

from headrace.data.errors import HeadraceError, InvalidInput, shown
from headrace.envs.metrics import Counts
from headrace.envs.types import Item, ScoredDataGroup, ScoredDataItem

T = TypeVar("T")

#: Numbers by token: every sequence of a group has them, or none has.
BY_TOKEN = ("advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids", "distill_logprobs")
#: Fields of a sequence, and the value for a sequence that has none.
BY_SEQUENCE: dict[str, Any] = {"messages": [], "overrides": {}, "images": None}
#: Fields of the whole group.
OF_GROUP = ("generation_params", "group_overrides")
#: Fields that are always there for `postprocess_histories`, empty where no rollout had them.
ALWAYS = ("advantages", "ref_logprobs", "messages", "overrides", "images")


class BadGroup(InvalidInput):
    """An invalid group; the message names the field."""

    code = "bad_group"


def is_scored_item(value: Any) -> bool:
    """Whether a rollout's result is a scored item; anything else is for `postprocess_histories` to score."""
    return isinstance(value, dict) and {"tokens", "masks", "scores"} <= value.keys()


def group_of(items: Sequence[ScoredDataItem]) -> ScoredDataGroup:
    """The group of several scored items, with every field that they have. Raises `BadGroup` where a field by token is
    in some of them only."""
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


def check_group(group: Any, group_size: int) -> None:
    """Raises `BadGroup` for a group that the API would refuse, or could never fill a batch with."""
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


def scores_equal(scores: Sequence[float]) -> bool:
    """Whether every score is the same, so that the group has no advantage to learn from."""
    return len(set(scores)) == 1


def _length(value: Any) -> int | None:
    """The length of a list, a tuple or an array; None of anything else."""
    return None if isinstance(value, str | bytes | dict) or not hasattr(value, "__len__") else len(value)


class RolloutFailed(HeadraceError):
    """A rollout failed at its last retry. Its failures are counted already."""

    code = "rollout_failed"


class InvalidResult(InvalidInput):
    """An environment's method returned a value of the wrong shape."""

    code = "rubbish"


async def with_retries(make: Callable[[], Awaitable[T]], retries: int, counts: Counts) -> T:
    """The result of a rollout, retried when it raises; after the last retry raises `RolloutFailed`. Each failure is
    counted, with its traceback."""
    for left in range(retries, -1, -1):
        try:
            return await make()
        except RolloutFailed:
            raise
        except Exception as error:
            counts.fail("rubbish" if isinstance(error, InvalidResult) else "rollout", error)
            if not left:
                raise RolloutFailed(str(error) or type(error).__name__) from error
    raise AssertionError("range() above always has a last turn")


async def run_rollouts(make: Callable[[], Awaitable[Any]], times: int, retries: int, counts: Counts) -> list[Any]:
    """The results of so many concurrent rollouts. One that fails for good cancels the others and raises."""

    async def one() -> Any:
        return check_result(await make(), "collect_trajectory")

    tasks = [asyncio.ensure_future(with_retries(one, retries, counts)) for _ in range(times)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def check_result(result: Any, method: str) -> tuple[Any, list[Item]]:
    """A method's (result, items to roll out later). Raises `InvalidResult` where it is no such pair."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], list | tuple):
        return result[0], list(result[1])
    raise InvalidResult(f"{method} must return (what it found, [item, ...]), not {shown(result)}")


def merge_rollouts(results: list[tuple[Any, list[Item]]]) -> tuple[Any, list[Item]]:
    """The group of the results' scored items, or the list of results where some are none; None where all are None.

    Beside it, the items to roll out later.
    """
    found = [result for result, _ in results if result is not None]
    backlog = [item for _, items in results for item in items]
    if not found:
        return None, backlog
    return (group_of(found) if all(map(is_scored_item, found)) else found), backlog
