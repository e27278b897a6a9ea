"""The same work for several servers at once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import wait
from functools import partial
from typing import TypeVar

from headrace.trainer.stopping import in_thread

A = TypeVar("A")
T = TypeVar("T")


def at_once(work: Callable[[A], T], items: Collection[A]) -> list[T]:
    """What each came to, in their order. Returns, or raises the first error, when all have ended."""
    if len(items) < 2:
        return [work(item) for item in items]
    futures = [in_thread(partial(work, item), "headrace-sync") for item in items]
    wait(futures)
    return [future.result() for future in futures]
