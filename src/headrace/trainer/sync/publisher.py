"""Publishing one version to every rollout server, so that nothing is sampled from weights that nobody checked.

The weights are copied out before anything is held; what happens while calls are held is `exchange`. A server that
failed is taken out, named and tried again at every publish: it is brought in once it has the newest weights.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from headrace.data.errors import InvalidInput
from headrace.data.step import INT32_MAX, check_count
from headrace.trainer.stopping import Outage, Stop
from headrace.trainer.sync.config import Mode, SyncConfig
from headrace.trainer.sync.delivery import NO_FOLDER, Delivery
from headrace.trainer.sync.errors import ServerFailed, SyncFailed
from headrace.trainer.sync.exchange import Exchange
from headrace.trainer.sync.front import front_of
from headrace.trainer.sync.http import Http
from headrace.trainer.sync.probe import Probe
from headrace.trainer.sync.report import Report
from headrace.trainer.sync.servers import HeadraceEngine, RolloutServer, Vllm, identify
from headrace.trainer.sync.threads import at_once

if TYPE_CHECKING:
    import torch

log = logging.getLogger("headrace.trainer.sync")


class Publisher:
    """Blocking; one publish at a time. Another thread may end it: `stop`, and then `cut`."""

    def __init__(self, config: SyncConfig, outage: Outage | None = None) -> None:
        """`outage` is told where the gateway does not answer; by default that is logged."""
        self.config = config
        self._cut = Stop()
        self._stopped = self._exchanging = False
        self._lock = threading.Lock()
        outage = outage or Outage(f"the gateway {config.gateway}", log.warning)
        self._front = front_of(config, self._cut, outage)
        self._key = config.server_key or os.environ.get("HEADRACE_UPSTREAM_KEY")
        #: Servers that were taken out, by address, with the reason.
        self._out: dict[str, str] = {}

    def check(self, model_config: Any) -> None:
        """Raises `SyncFailed` unless every server can be published to; `model_config` is the trained model's."""
        self._front.await_ready()
        servers, failed = self._reached(self._front.addresses())
        for server in servers:
            if isinstance(server, Vllm):
                tied = server.tied()
                if tied:
                    failed[server.address] = (
                        f"{server.address} is vLLM and serves {server.root}, whose config.json ties lm_head to the "
                        "embeddings: a reload leaves the old lm_head in place. Serve an untied copy; "
                        f"python -m headrace.trainer.sync.untie {server.root} INTO makes one"
                    )
                elif tied is None and getattr(model_config, "tie_word_embeddings", False):
                    log.warning(
                        "%s serves %s, which cannot be read from here; the model ties its embeddings, so vLLM must "
                        "serve an untied copy (python -m headrace.trainer.sync.untie)",
                        server.address,
                        server.root,
                    )
        if failed or not servers:
            raise SyncFailed(_none("weights cannot be published", failed), failed)
        if self.config.folder is None and not all(server.shared for server in servers):
            raise InvalidInput(NO_FOLDER)

    def await_reachable(self) -> None:
        """Waits for a gateway that does not answer, for at most `timeout_s`; then it is `SyncFailed`."""
        self._front.await_reachable()

    def stop(self) -> None:
        """Nothing more is published, and a publish that holds no calls yet ends at once. One that does goes on: half
        of it would leave the gateway without servers."""
        with self._lock:
            self._stopped = True
            if not self._exchanging:
                self._cut.set("stop")

    def cut(self) -> None:
        """Ends a publish that holds calls: servers that are not known to have the weights are taken out, and calls go
        on."""
        self._cut.set("cut")

    def publish(self, weights: Mapping[str, torch.Tensor], version: int, probe: Probe) -> Report:
        """Brings every server to these weights. Raises `SyncFailed` where none could be, or where `stop` came before
        it had begun."""
        began = time.monotonic()
        newest = self._front.newest()
        if check_count(version, "version", most=INT32_MAX) < newest:
            raise InvalidInput(f"version is {version}; the gateway is at {newest}, and versions do not go back")
        known = self._front.addresses()
        servers, failed = self._reached([*known, *(address for address in self._out if address not in known)])
        with self._lock:
            if self._stopped:
                raise SyncFailed(f"the run was stopped before version {version} was published")
            self._exchanging = True
        try:
            return self._exchange(weights, version, probe, known, servers, failed, began)
        finally:
            self._exchanging = False

    def _exchange(
        self,
        weights: Mapping[str, torch.Tensor],
        version: int,
        probe: Probe,
        known: dict[str, bool],
        servers: list[RolloutServer],
        failed: dict[str, str],
        began: float,
    ) -> Report:
        for address, reason in failed.items():  # before the pause, which would wait for them
            self._front.take_out(address)
            self._note(address, reason)
        if not servers:
            raise SyncFailed(_none("no rollout server has the new weights", failed), failed)
        ways = {server.shared for server in servers}
        delivery = Delivery(weights, version, shared=True in ways, files=False in ways, folder=self.config.folder)
        exchange = Exchange(self._front, servers, known, self._mode(servers), delivery)
        try:
            exchange.run(probe if self.config.verify else None, self.config.tolerance)
        finally:
            delivery.close()
            for address, reason in exchange.failed.items():
                self._note(address, reason)
        failed |= exchange.failed
        if not exchange.gaps:
            raise SyncFailed(_none("no rollout server has the new weights", failed), failed)
        self._bring_in([address for address in exchange.gaps if address not in known], version)
        gaps = [gap for gap in exchange.gaps.values() if gap is not None]
        return Report(
            version=version,
            mode=self._mode(servers),
            seconds=time.monotonic() - began,
            hold_s=exchange.hold_s,
            gap_max=max((gap.largest for gap in gaps), default=None),
            gap_mean=sum(gap.mean for gap in gaps) / len(gaps) if gaps else None,
            failed=failed,
        )

    def close(self) -> None:
        """Nothing is held between two publishes; the newest files stay, for the servers may still map them."""

    def _reached(self, addresses: Iterable[str]) -> tuple[list[RolloutServer], dict[str, str]]:
        """The servers that answer, and why others cannot be published to."""

        def reach(address: str) -> RolloutServer | ServerFailed:
            try:
                http = Http(address, key=self._key, timeout_s=self.config.timeout_s, cut=self._cut)
                return identify(http, self.config.via)
            except ServerFailed as error:
                return error

        asked = list(addresses)
        found = dict(zip(asked, at_once(reach, asked), strict=True))
        failed = {address: str(error) for address, error in found.items() if isinstance(error, ServerFailed)}
        return [server for server in found.values() if isinstance(server, RolloutServer)], failed

    def _mode(self, servers: Iterable[RolloutServer]) -> Mode:
        if self.config.mode != "auto":
            return self.config.mode
        return "keep" if all(isinstance(server, HeadraceEngine) for server in servers) else "abort-resume"

    def _note(self, address: str, reason: str) -> None:
        log.error("rollout server taken out: %s", reason)
        self._out[address] = reason

    def _bring_in(self, addresses: Iterable[str], version: int) -> None:
        for address in addresses:
            self._front.bring_in(address)
            self._front.tell(address, version)
            log.warning("rollout server %s is back, with version %d", address, version)
            del self._out[address]


def _none(what: str, failed: Mapping[str, str]) -> str:
    return f"{what}: {'; '.join(failed.values()) or 'there is no rollout server'}"
