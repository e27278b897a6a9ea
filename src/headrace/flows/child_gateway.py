"""The gateway as a rollouter's child: `headrace gateway` in a process of its own, started again when it dies.

It listens on the same port in all of its lives, so that addresses which agents hold stay right; with a journal, it
comes back with everything that was acknowledged. It ends with the rollouter, also where that is killed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from headrace.data.errors import HeadraceError
from headrace.processes import Child, ChildDied, Processes

log = logging.getLogger("headrace.flows")

#: What its process and its log are called.
GATEWAY_NAME = "gateway"
#: Seconds before it is started again: the first time, and at most, when it dies again and again.
RESTART_S, MAX_RESTART_S = 0.2, 10.0
#: Lives in a row in which it did not begin to listen, after which it is given up: its port or its journal is another's.
MAX_STILLBORN = 5
#: Flags that are handed over in the environment: what stands on a command line is in the process list.
KEY_VARIABLES = {
    "api_key": "HEADRACE_API_KEY",
    "reward_key": "HEADRACE_REWARD_KEY",
    "admin_key": "HEADRACE_ADMIN_KEY",
    "upstream_key": "HEADRACE_UPSTREAM_KEY",
}


class ChildGateway:
    """The process while the context lasts, made and left in the main thread. `flags` are those of `headrace gateway`,
    by their names; its output is in `gateway.log` below `logs`."""

    def __init__(self, flags: Mapping[str, Any], logs: Path) -> None:
        given = {name.replace("-", "_"): value for name, value in flags.items()}
        self._env = {variable: str(given.pop(name)) for name, variable in KEY_VARIABLES.items() if given.get(name)}
        self._flags: dict[str, Any] = {"host": "127.0.0.1", "port": 0, **given}
        self._processes = Processes(logs)
        self._child: Child | None = None
        self._ending = False
        self.log = logs / f"{GATEWAY_NAME}.log"
        #: How often it was started.
        self.starts = 0

    def __enter__(self) -> ChildGateway:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ending = True
        self._processes.__exit__(kind, error, at)

    @property
    def pid(self) -> int:
        """Its process id, in this life."""
        assert self._child is not None
        return self._child.process.pid

    def listening(self) -> str:
        """Its address, as soon as it listens; it may not be ready yet. Raises `HeadraceError`, with what it said last,
        where it ends before."""
        try:
            return self._listening()
        except ChildDied as error:
            raise self._gave_up(error) from None

    async def keep(self) -> None:
        """Starts it again whenever it dies, until it is cancelled or the context ends. Raises `HeadraceError` where it
        dies again and again before it listens."""
        stillborn, pause_s = 0, RESTART_S
        while True:
            child = self._child
            assert child is not None
            await asyncio.to_thread(child.process.wait)
            if self._ending:
                return
            try:
                child.check()
            except ChildDied as error:
                log.warning("%s; it is started again (its log is %s)", error, self.log)
                if stillborn >= MAX_STILLBORN:
                    raise self._gave_up(error) from None
            await asyncio.sleep(pause_s)
            self._processes.end(child)
            self._start()
            try:
                await asyncio.to_thread(self._listening)
                stillborn, pause_s = 0, RESTART_S
            except ChildDied:
                stillborn, pause_s = stillborn + 1, min(pause_s * 2, MAX_RESTART_S)

    def _start(self) -> None:
        self._child = self._processes.start(
            GATEWAY_NAME, "headrace", "gateway", *_command_line(self._flags), env=self._env
        )
        self.starts += 1

    def _listening(self) -> str:
        assert self._child is not None
        address = self._child.listening(GATEWAY_NAME)
        parts = urlsplit(address)
        self._flags["port"] = parts.port
        if parts.hostname == "0.0.0.0":  # every address of this machine, of which this one is at hand
            return address.replace("0.0.0.0", "127.0.0.1", 1)
        return address

    def _gave_up(self, error: ChildDied) -> HeadraceError:
        said = error.tail.splitlines()[-1:] or ["nothing"]
        return HeadraceError(f"{error}; it said: {said[0].removeprefix('headrace: ')} (its log is {self.log})")


def _command_line(flags: Mapping[str, Any]) -> Sequence[str]:
    """Flags as they are typed: a list's once for each item, true without a value, false as `--no-`, None not."""
    found: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            found.append(flag)
        elif value is False:
            found.append(flag.replace("--", "--no-", 1))
        elif isinstance(value, list | tuple):
            for item in value:
                found += [flag, str(item)]
        elif value is not None:
            found += [flag, str(value)]
    return found
