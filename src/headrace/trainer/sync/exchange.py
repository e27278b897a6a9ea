"""From the pause to the resume: of all servers at once, load and verify; then the ones that failed are taken out.

However it ends, calls go on only to servers that are known to have the new weights. Where none is left they go on too:
a gateway without servers samples nothing, and its 503 tells an agent more than silence would.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from headrace.trainer.sync.config import Mode
from headrace.trainer.sync.delivery import Delivery
from headrace.trainer.sync.errors import ServerFailed
from headrace.trainer.sync.front import Front
from headrace.trainer.sync.probe import Gap, Probe, tolerance
from headrace.trainer.sync.servers import RolloutServer
from headrace.trainer.sync.threads import at_once

log = logging.getLogger("headrace.trainer.sync")


class Exchange:
    """One version's way into some servers. `run` once; then `gaps` has the ones that took it, `failed` the others."""

    def __init__(
        self, front: Front, servers: Sequence[RolloutServer], held: dict[str, bool], mode: Mode, delivery: Delivery
    ) -> None:
        """`held` has the servers that the front knows, and whether its pause holds what they have in flight."""
        self._front, self._servers, self._held = front, servers, held
        self._mode, self._delivery = mode, delivery
        self.gaps: dict[str, Gap | None] = {}
        self.failed: dict[str, str] = {}
        self.hold_s = 0.0

    def run(self, probe: Probe | None, most: float | None) -> None:
        """Verifies by `probe` where there is one; `most` is the largest gap allowed, if not the precision's own."""
        began = time.monotonic()
        self._front.pause(self._mode, self._servers)
        try:
            at_once(lambda server: self._bring(server, probe, most), self._servers)
        finally:
            self._settle()
            self.hold_s = time.monotonic() - began
        at_once(self._resume, self._right())

    def _bring(self, server: RolloutServer, probe: Probe | None, most: float | None) -> None:
        known = server.address in self._held
        try:
            if not self._held.get(server.address):
                server.pause("abort")
            server.load(self._delivery)
            gap = None
            if probe is not None:
                if not server.scores_paused:
                    if known and self._mode == "keep":  # what was frozen goes on here, and is of this version
                        self._front.tell(server.address, self._delivery.version)
                    server.resume()
                gap = self._gap(server, probe, most)
        except ServerFailed as error:
            self.failed[server.address] = str(error)
            return
        if known:
            self._front.tell(server.address, self._delivery.version)
        self.gaps[server.address] = gap

    def _gap(self, server: RolloutServer, probe: Probe, most: float | None) -> Gap:
        found, dtype = server.score(list(probe.ids))
        gap = probe.gap(found)
        allowed = Gap(most, most) if most is not None else tolerance(self._delivery.dtype, probe.dtype, dtype)
        if not gap.within(allowed):
            raise ServerFailed(
                f"{server.address} does not have the weights it was given: a log-prob is {gap.largest:.2g} off the "
                f"trainer's, {gap.mean:.2g} in the mean, where {allowed.largest:g} and {allowed.mean:g} are allowed "
                "(sync.tolerance; tied embeddings on vLLM and another --dtype are the usual reasons)"
            )
        return gap

    def _settle(self) -> None:
        wrong = [server for server in self._servers if server.address not in self.gaps]
        for server in wrong:
            self.failed.setdefault(server.address, f"{server.address} was being loaded when the sync was interrupted")
        at_once(_discard, wrong)
        try:
            for server in wrong:
                self._front.take_out(server.address)
            self._front.resume(self._right())
        except BaseException:
            at_once(self._resume, self._right())  # they may go on, whatever became of the gateway
            raise

    def _right(self) -> list[RolloutServer]:
        return [server for server in self._servers if server.address in self.gaps]

    def _resume(self, server: RolloutServer) -> None:
        """A gateway resumes what it paused itself; one that was started anew meanwhile knows of nothing."""
        try:
            server.resume()
        except ServerFailed as error:
            log.warning("%s", error)


def _discard(server: RolloutServer) -> None:
    try:
        server.discard()
    except ServerFailed as error:
        log.info("%s", error)  # it cannot even be told: nothing of it is waited for
