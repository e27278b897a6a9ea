"""The same work for several servers at once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
T = TypeVar("T")


def at_once(work: Callable[[A], T], items: Collection[A]) -> list[T]:
    """What each came to, in their order. Returns, or raises the first error, when all have ended."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(len(items), thread_name_prefix="headrace-sync") as threads:
        return [future.result() for future in [threads.submit(work, item) for item in items]]
