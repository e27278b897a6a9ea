"""One source of a reward: what it is asked, how often, and how its failures stay with the samples they belong to."""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from headrace.rewards.sample import RewardFailure, Sample, Score

log = logging.getLogger("headrace.rewards")

#: Seconds before the first attempt after a failure of a server; twice that before each further one, up to the most.
#: Each is shortened by chance, by up to half, so that not all come again at once.
FIRST_WAIT_S, MOST_WAIT_S = 0.5, 30.0

Outcome = Score | RewardFailure
Item = TypeVar("Item")
Result = TypeVar("Result")


class RewardCounters(msgspec.Struct):
    """What a reward did so far."""

    #: Samples that got a score.
    scored: int = 0
    #: Samples that got none, by reason.
    failed: dict[str, int] = {}
    #: Further attempts after a failed one, of any source.
    retried: int = 0
    #: Tokens of the judges' prompts and answers, as their servers count them.
    tokens_in: int = 0
    tokens_out: int = 0


class RewardSource(ABC):
    """Scores samples, each by itself: a sample that fails changes nothing about the others."""

    name: str
    weight: float

    @abstractmethod
    async def scores(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome for each sample, in their order. Raises nothing but for a cancellation."""

    async def ready(self) -> None:  # noqa: B027  # most have nothing to wait for
        """Returns once it could score. Raises `InvalidInput` where it never will, such as for a function that cannot be
        imported."""

    async def aclose(self) -> None:  # noqa: B027
        """Ends its processes and connections."""


async def attempts(
    call: Callable[[], Awaitable[Score]], retries: int, counters: RewardCounters, wait_s: float = 0.0
) -> Outcome:
    """What `call` returned, or its last failure after `retries` further attempts; `wait_s` is the first wait between
    two. Whatever else it raises is such a failure too."""
    for attempt in range(retries + 1):
        try:
            return await call()
        except RewardFailure as failed:
            failure = failed
        except Exception as error:  # no source should raise it; what it does costs this sample alone
            failure = raised(error)
        if attempt == retries or not failure.again:
            return failure
        counters.retried += 1
        wait = min(wait_s * 2**attempt, MOST_WAIT_S) * random.uniform(0.5, 1.0)
        await asyncio.sleep(max(wait, min(failure.after_s, MOST_WAIT_S)))
    raise AssertionError("not reached")


def raised(error: Exception, source: str = "", *, again: bool = True) -> RewardFailure:
    """The failure of a sample over which a source raised something else: it names what, and the log has where."""
    if isinstance(error, ExceptionGroup):  # of `spread`
        error = error.exceptions[0]
    log.error("a source of the reward raised %s over a sample", type(error).__name__, exc_info=error)
    return RewardFailure(f"it raised {type(error).__name__}: {error}", "error", source, again=again)


async def spread(items: Sequence[Item], call: Callable[[Item], Awaitable[Result]], concurrency: int) -> list[Result]:
    """The results of `call` for all items, in their order, at most so many at once."""
    results: list[Result | None] = [None] * len(items)
    left = iter(enumerate(items))

    async def runner() -> None:
        for at, item in left:
            results[at] = await call(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(items))):
            group.create_task(runner())
    return results  # type: ignore[return-value]  # every place was filled, or the group has raised
