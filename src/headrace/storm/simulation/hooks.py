"""The pool's code on simulated time: while a simulation runs, the modules that ask the system for the time, for locks,
threads and random names ask the simulation instead. Nothing of the pool is changed for it, and nothing outlives it.

It is for one simulation at a time, in a process whose other threads use no pool.
"""

from __future__ import annotations

import logging
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from headrace.pool import containers, embedded, journaled, remote
from headrace.pool.journal import files, journal, records
from headrace.storm.simulation.scheduler import SimulatedLock, SimulatedLoop, SimulatedScheduler

#: Bytes from which a journal is worth rewriting in a simulation, which writes a megabyte in all.
COMPACT_FROM_BYTES = 150_000
#: Seconds between two slices of a snapshot: so many that calls come in between.
BETWEEN_SLICES_S = 0.03


@contextmanager
def hooked(
    scheduler: SimulatedScheduler,
    loop: SimulatedLoop,
    wall: Callable[[], float],
    boot: Callable[[], bytes],
    chance: random.Random,
) -> Iterator[None]:
    """Has the pool's code run on a simulation: its clock, its threads, names by its seed, and `boot`, which tells one
    start of the machine from another."""

    def new_lock() -> SimulatedLock:
        return SimulatedLock(scheduler)

    def new_thread(target: Callable[[], None], name: str = "", **_: object) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: loop.spawn(target, name))

    def new_name() -> uuid.UUID:
        return uuid.UUID(int=chance.getrandbits(128), version=4)

    time = SimpleNamespace(
        time=wall, monotonic=lambda: scheduler.now, perf_counter=scheduler.measured, sleep=scheduler.sleep
    )
    threading = SimpleNamespace(Lock=new_lock, Thread=new_thread)
    names = SimpleNamespace(uuid4=new_name)
    replaced: list[tuple[Any, str, Any]] = [
        *((module, "time", time) for module in (embedded, remote, journaled, journal, records)),
        *((module, "threading", threading) for module in (journaled, journal)),
        *((module, "uuid", names) for module in (remote, containers)),
        (files, "boot_id", boot),
        (journaled, "COMPACT_FROM_BYTES", COMPACT_FROM_BYTES),
        (journaled, "BETWEEN_SLICES_S", BETWEEN_SLICES_S),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    loggers = [(logger, logger.level) for logger in map(logging.getLogger, ("headrace.pool", "asyncio"))]
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        for logger, _ in loggers:
            logger.setLevel(logging.CRITICAL + 1)  # a simulation has thousands of torn tails and full disks
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        for logger, level in loggers:
            logger.setLevel(level)
