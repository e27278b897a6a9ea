"""One item's rollouts: side by side, made again where they raise, and what comes of them told apart from rubbish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from headrace.data.errors import HeadraceError, InvalidInput, shown
from headrace.envs.counts import Counts
from headrace.envs.grouping import group_of, is_item
from headrace.envs.types import Item

T = TypeVar("T")


class RolloutFailed(HeadraceError):
    """A rollout raised as often as it may. It was counted when it did."""

    code = "rollout_failed"


class Rubbish(InvalidInput):
    """An environment's method returned what it must not."""

    code = "rubbish"


async def again(make: Callable[[], Awaitable[T]], retries: int, counts: Counts) -> T:
    """The result of a rollout, which is made again when it raises. Each failure is counted, with its traceback."""
    for left in range(retries, -1, -1):
        try:
            return await make()
        except RolloutFailed:
            raise
        except Exception as error:
            counts.fail("rubbish" if isinstance(error, Rubbish) else "rollout", error)
            if not left:
                raise RolloutFailed(str(error) or type(error).__name__) from error
    raise AssertionError("range() above always has a last turn")


async def side_by_side(make: Callable[[], Awaitable[Any]], times: int, retries: int, counts: Counts) -> list[Any]:
    """So many rollouts at once. One that fails for good ends the group; the others are then not waited for."""

    async def one() -> Any:
        return pair(await make(), "collect_trajectory")

    tasks = [asyncio.ensure_future(again(one, retries, counts)) for _ in range(times)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def pair(result: Any, method: str) -> tuple[Any, list[Item]]:
    """What a method returned, checked to be what it found and a list of items to be rolled out later."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], list | tuple):
        return result[0], list(result[1])
    raise Rubbish(f"{method} must return (what it found, [item, ...]), not {shown(result)}")


def joined(results: list[tuple[Any, list[Item]]]) -> tuple[Any, list[Item]]:
    """The group of scored items, or, where there are other things, the list of them; None where there is nothing."""
    found = [result for result, _ in results if result is not None]
    backlog = [item for _, items in results for item in items]
    if not found:
        return None, backlog
    return (group_of(found) if all(map(is_item, found)) else found), backlog
