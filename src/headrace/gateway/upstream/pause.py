"""Pausing the servers around an exchange of weights, and letting them go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from headrace.data.errors import InvalidInput, shown
from headrace.gateway.upstream.errors import CannotPause, RolloutServerFailed, read_fault
from headrace.gateway.upstream.fleet import Fleet
from headrace.gateway.upstream.gate import Deadline, Gate
from headrace.gateway.upstream.http_client import UpstreamClient
from headrace.gateway.upstream.options import UpstreamOptions
from headrace.gateway.upstream.server import UpstreamServer

log = logging.getLogger("headrace.gateway")

#: Seconds after which a pause ends by itself, so that a trainer that died does not hold the calls: by default (the
#: longest exchange of weights takes minutes), and at most (a day).
PAUSE_LEASE_S, MAX_PAUSE_LEASE_S = 900.0, 86_400
#: What becomes of calls in flight: they end (drain), freeze on the servers (keep), or are cut and later continued from
#: their tokens (abort-resume).
PAUSE_MODES = ("drain", "keep", "abort-resume")


class PauseControl:
    """Pauses and resumes all servers.

    The gate is closed before any server is asked, and open again whenever a pause failed or its lease ran out. Then
    servers with weights that nobody verified are taken out, and what was frozen on them ends."""

    def __init__(self, fleet: Fleet, gate: Gate, options: UpstreamOptions, deadlines: Iterable[Deadline]) -> None:
        self.client: UpstreamClient | None = None
        self._fleet, self._gate, self._options, self._deadlines = fleet, gate, options, deadlines
        self._paused: list[UpstreamServer] = []
        self._one_at_a_time = asyncio.Lock()
        self._lease: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[None] | None = None
        #: What became of the last pause, where nobody ended it.
        self.overdue: str | None = None

    async def pause(self, mode: str, lease_s: float) -> None:
        """Holds new requests for `lease_s` seconds at most; pausing again begins that time anew. Raises `CannotPause`,
        with everything resumed, where a server cannot be paused."""
        if mode not in PAUSE_MODES:
            raise InvalidInput(f"mode is {shown(mode)}; it must be one of {', '.join(PAUSE_MODES)}")
        async with self._one_at_a_time:
            self._gate.close()
            self._end_after(lease_s)
            if mode != "drain":
                await self._freeze(mode)
                return
            if self._paused:
                return  # what is in flight is held already, and would never end
        await self._gate.wait_quiet()

    async def resume(self) -> None:
        """Ends a pause: servers resume, deadlines run again, the gate opens. One that cannot resume is taken out."""
        async with self._one_at_a_time:
            await self._release()

    def close(self) -> None:
        """Forgets the end of a pause's lease."""
        if self._lease is not None:
            self._lease.cancel()

    def _end_after(self, lease_s: float) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self.overdue = None
        self._lease = asyncio.get_running_loop().call_later(lease_s, self._expire, lease_s)

    def _expire(self, lease_s: float) -> None:
        self.overdue = f"nobody resumed within the {lease_s:g} s that a pause was for: calls go on without a word"
        log.error("%s", self.overdue)
        self._ending = asyncio.ensure_future(self._resume_verified())

    async def _resume_verified(self) -> None:
        async with self._one_at_a_time:
            held = await self._fleet.hold_unverified({*self._paused, *self._fleet.up})
            await asyncio.gather(*(self._ask(server, "/pause?mode=abort") for server in held), return_exceptions=True)
            self._paused = [server for server in self._paused if server not in held]
            await self._release()

    async def _freeze(self, mode: str) -> None:
        for deadline in self._deadlines:
            deadline.freeze()
        if mode == "abort-resume":
            self._gate.abort()
        servers = [server for server in self._fleet.servers.values() if server.state in ("up", "leaving")]
        asked = "/pause?mode=abort" if mode == "abort-resume" else "/pause?mode=keep"
        found = await asyncio.gather(*(self._ask(server, asked) for server in servers), return_exceptions=True)
        self._paused += [server for server, error in zip(servers, found, strict=True) if error is None]
        failed = [error for error in found if error is not None]
        if failed:
            await self._release()
            raise failed[0]

    async def _release(self) -> None:
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        servers, self._paused = self._paused, []
        found = await asyncio.gather(*(self._ask(server, "/resume") for server in servers), return_exceptions=True)
        for server, error in zip(servers, found, strict=True):
            if error is not None:
                self._fleet.down(server, str(error))
        for deadline in self._deadlines:
            deadline.thaw()
        self._gate.open()

    async def _ask(self, server: UpstreamServer, path: str) -> None:
        assert self.client is not None, "start() comes before a pause"
        try:
            status, data = await self.client.ask("POST", server.url(path), None, self._options.control_s)
        except RolloutServerFailed as error:
            if error.kind == "unreachable":  # it holds nothing that could go on
                self._fleet.down(server, str(error))
                return
            raise CannotPause(f"{server.address} did not answer {path}: {error}") from error
        if status == 404:
            raise CannotPause(
                f"{server.address} has no {path.partition('?')[0]}; start vLLM with VLLM_SERVER_DEV_MODE=1"
            )
        if status != 200:
            raise CannotPause(f"{server.address} answered {path} with {status}: {read_fault(status, data).message}")
