"""Running a part of a benchmark in a process of its own: nothing that ran before it is in its memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def apart(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What the function, which must be importable, returns in a new process that ends with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args, **kwargs).result()
