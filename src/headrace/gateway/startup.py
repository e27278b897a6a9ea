"""Who hears how a gateway's start goes: what it waits for, that it is ready, or why it never will be.

What can heal is waited for, and its reason told once, and again when it changes: a rollout server that is not up yet,
or that does not match. What cannot heal ends it: a folder that holds no tokenizer, an extra that is not installed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Literal, Protocol

import msgspec

from headrace.data.errors import HeadraceError

log = logging.getLogger("headrace.gateway")

#: Seconds between two looks at what a gateway waits for: soon enough for people, and no load.
POLL_INTERVAL_S = 0.05


class ProcessObserver(Protocol):
    """Hears of a whole process: first that it listens at `address`, then what it waits for, then that it is ready."""

    def listening(self, address: str) -> None: ...

    def waiting(self, reason: str) -> None: ...

    def ready(self, address: str) -> None: ...


class StartupObserver(Protocol):
    """Hears of one gateway's start, within its process. Nothing follows `ready` or `failed`."""

    def waiting(self, reason: str) -> None: ...

    def ready(self) -> None: ...

    def failed(self, error: Exception) -> None: ...


class Starting(Protocol):
    """Something that starts, and says how far it is."""

    @property
    def waits_for(self) -> str | None:
        """None once it is ready."""
        ...

    @property
    def failure(self) -> Exception | None:
        """Why it will never be ready; None while it may be."""
        ...


async def observe_startup(starting: Starting, observer: StartupObserver) -> None:
    """Tells an observer what is waited for, whenever that changes, until it is ready or has failed."""
    said: str | None = None
    while starting.failure is None and (reason := starting.waits_for) is not None:
        if reason != said:
            observer.waiting(reason)
            said = reason
        await asyncio.sleep(POLL_INTERVAL_S)
    if starting.failure is not None:
        observer.failed(starting.failure)
    else:
        observer.ready()


class LogObserver:
    """Writes to the log: for an application that others serve, which goes on whatever happens."""

    def waiting(self, reason: str) -> None:
        log.info("%s", reason)

    def ready(self) -> None:
        log.info("ready")

    def failed(self, error: Exception) -> None:
        log.error("not ready: %s", error)


class WorkerMessage(msgspec.Struct, omit_defaults=True):
    """What a worker tells its parent, one line of JSON each."""

    what: Literal["listening", "waiting", "ready", "failed", "ended"]
    text: str = ""
    #: Which module is not installed, where that is why it failed.
    module: str | None = None

    @property
    def error(self) -> Exception:
        """Why it failed."""
        return HeadraceError(self.text) if self.module is None else ModuleNotFoundError(self.text, name=self.module)


class WorkerReporter:
    """A worker's observer: tells the parent process, on stdout, which ends a worker that has failed."""

    def listening(self, address: str) -> None:
        _write(WorkerMessage("listening", address))

    def waiting(self, reason: str) -> None:
        _write(WorkerMessage("waiting", reason))

    def ready(self) -> None:
        _write(WorkerMessage("ready"))

    def failed(self, error: Exception) -> None:
        _write(WorkerMessage("failed", str(error), error.name if isinstance(error, ModuleNotFoundError) else None))

    def ended(self) -> None:
        """It ends by itself: it was not killed."""
        _write(WorkerMessage("ended"))


def _write(line: WorkerMessage) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()
