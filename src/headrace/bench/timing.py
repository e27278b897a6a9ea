"""Timing: the two sides of a ratio in turn, and the medians of both.

Whatever else the machine does then affects both sides alike, and a slow moment moves neither median.
"""

from __future__ import annotations

import mmap
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

median = statistics.median

_MB = 1 << 20


def seconds(action: Callable[[], object], times: int = 1) -> float:
    """Mean seconds of an action over so many calls in a row."""
    start = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - start) / times


def in_turn(
    a: Callable[[], float], b: Callable[[], float], rounds: int, *, warm_up: int = 1
) -> tuple[list[float], list[float]]:
    """Seconds of each side, round by round: a, b, a, b, ...; the first `warm_up` rounds are not counted."""
    found: list[tuple[float, float]] = []
    for _ in range(warm_up + rounds):
        found.append((a(), b()))
    kept = found[warm_up:]
    return [first for first, _ in kept], [second for _, second in kept]


def warm_memory(mb: int) -> None:
    """Touches and frees so much memory, so that what is timed next does not touch it for the first time.

    A virtual machine returns free memory to its host, and the first touch after that costs several times an ordinary
    page fault: a figure would depend on how long the machine had been idle.
    """
    page = bytes(_MB)
    with mmap.mmap(-1, mb * _MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for _ in range(mb):
            memory.write(page)


def in_own_process(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The function's result in a new process of its own, without anything of this one in its memory. The function must
    be importable."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args, **kwargs).result()
