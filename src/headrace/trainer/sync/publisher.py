"""Publishing one version to every rollout server, so that nothing is sampled from unverified weights.

The weights are copied out before calls are paused; then, during the pause, they are loaded and verified
(`WeightUpdate`). A server that failed is removed, with the reason, and tried again at every publish: it is added back
once it has the newest weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.data.errors import InvalidInput
from headrace.data.keys import configured_key
from headrace.data.step import INT32_MAX, check_count
from headrace.data.weight_version import UNVERIFIED
from headrace.trainer.stopping import Outage, StopSignal, for_each_in_threads
from headrace.trainer.sync.config import Mode, SyncConfig
from headrace.trainer.sync.gateway_control import CallControl, call_control
from headrace.trainer.sync.http import ServerFailed, ServerHttp, SyncFailed
from headrace.trainer.sync.servers import HeadraceEngine, RolloutServer, Vllm, identify
from headrace.trainer.sync.weights import (
    NO_FOLDER,
    AdapterWeights,
    Gap,
    Probe,
    WeightDelivery,
    WeightTransport,
    converted,
    device_of,
    tolerance,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger("headrace.trainer.sync")


@dataclass(frozen=True)
class SyncReport:
    """One publish, as it ended.

    seconds     in all, the weights' copy before the pause included
    hold_s      from the pause asked for to the resume answered: the longest that a call was held
    gap_max     largest difference of a log-prob between a server and the trainer; None where it was not verified
    gap_mean    the mean over tokens and servers
    failed      servers that were taken out, each with the reason
    """

    version: int
    mode: str
    seconds: float
    hold_s: float
    gap_max: float | None = None
    gap_mean: float | None = None
    failed: dict[str, str] = field(default_factory=dict)


class Publisher:
    """Publishes weights, blocking, one version at a time. Another thread may end a publish: `stop`, and then `cut`."""

    def __init__(self, config: SyncConfig, outage: Outage | None = None) -> None:
        """`outage` is told whether the gateway answers; by default that is logged."""
        self.config = config
        self._cut = StopSignal()
        self._stopped = self._updating = False
        self._lock = threading.Lock()
        outage = outage or Outage(f"the gateway {config.gateway}", log.warning)
        self._control = call_control(config, self._cut, outage)
        self._key = configured_key(config.server_key, "HEADRACE_UPSTREAM_KEY")
        #: Servers that were taken out, by address, with the reason.
        self._taken_out: dict[str, str] = {}
        #: Servers of which it was said that they get an adapter's merged weights.
        self._merged_to: set[str] = set()
        #: Why each server does not get weights by CUDA IPC; None where it does.
        self._not_by_gpu: dict[str, str | None] = {}
        #: What all servers compute in, as they said last.
        self._dtype: str | None = None

    def check(self, model_config: Any, lora_rank: int | None = None) -> None:
        """Raises `SyncFailed` unless every server can be published to; `model_config` is the trained model's,
        `lora_rank` that of its adapter, where it has one."""
        self._control.await_ready()
        servers, failed = self._reached(self._control.addresses())
        failed |= self._choose_adapters(servers, lora_rank)
        for server in servers:
            if isinstance(server, Vllm) and not server.by_adapter and server.address not in failed:
                tied = server.tied()
                if tied:
                    failed[server.address] = (
                        f"{server.address} is vLLM and serves {server.root}, whose config.json ties lm_head to the "
                        "embeddings: a reload leaves the old lm_head in place. Serve an untied copy; "
                        f"python -m headrace.trainer.sync.untie {server.root} INTO makes one"
                    )
                    if lora_rank is not None:
                        why = self._why_no_adapter(server, lora_rank)
                        failed[server.address] += f". Or have the adapter published by itself: {why}"
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
        self._agreed_dtype(servers)

    def await_reachable(self) -> None:
        """Waits for a gateway that does not answer; raises `SyncFailed` after `timeout_s`."""
        self._control.await_reachable()

    def stop(self) -> None:
        """Nothing more is published, and a publish that has not paused calls yet ends at once. One that has goes on:
        half of it would leave the gateway without servers."""
        with self._lock:
            self._stopped = True
            if not self._updating:
                self._cut.set("stop")

    def cut(self) -> None:
        """Ends a publish during its pause: servers not known to have the weights are removed, and calls resume."""
        self._cut.set("cut")

    def snapshot(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of these weights to be published while training goes on, in what the servers computed in when they
        were last asked."""
        found = {}
        for name, tensor in weights.items():
            held = converted(tensor.detach(), self._dtype)
            found[name] = held.clone() if held.data_ptr() == tensor.data_ptr() else held
        return found

    def publish(self, weights: Mapping[str, torch.Tensor] | AdapterWeights, version: int, probe: Probe) -> SyncReport:
        """Loads and verifies these weights on every server. Raises `SyncFailed` where no server has them, or `stop`
        came before the pause; `InvalidInput` for a version below the gateway's."""
        began = time.monotonic()
        newest = self._control.newest()
        if check_count(version, "version", most=INT32_MAX) < newest:
            raise InvalidInput(f"version is {version}; the gateway is at {newest}, and versions do not go back")
        known = self._control.addresses()
        servers, failed = self._reached([*known, *(address for address in self._taken_out if address not in known)])
        with self._lock:
            if self._stopped:
                raise SyncFailed(f"the run was stopped before version {version} was published")
            self._updating = True
        try:
            return self._update_servers(weights, version, probe, known, servers, failed, began)
        finally:
            self._updating = False

    def _update_servers(
        self,
        weights: Mapping[str, torch.Tensor] | AdapterWeights,
        version: int,
        probe: Probe,
        known: dict[str, bool],
        servers: list[RolloutServer],
        failed: dict[str, str],
        began: float,
    ) -> SyncReport:
        failed |= self._choose_adapters(servers, weights.rank if isinstance(weights, AdapterWeights) else None)
        failed |= self._choose_cuda_ipc(servers, weights)
        servers = [server for server in servers if server.address not in failed]
        for address, reason in failed.items():  # before the pause, which would wait for them
            self._control.remove_server(address)
            self._note(address, reason)
        if not servers:
            raise SyncFailed(_none("no rollout server has the new weights", failed), failed)
        delivery = self._delivery(weights, version, servers)
        update = WeightUpdate(self._control, servers, known, self._mode(servers), delivery)
        try:
            update.run(probe if self.config.verify else None, self.config.tolerance)
        finally:
            delivery.close()
            for address, reason in update.failed.items():
                self._note(address, reason)
        failed |= update.failed
        if not update.gaps:
            raise SyncFailed(_none("no rollout server has the new weights", failed), failed)
        self._add_back([server for server in servers if server.address in update.gaps.keys() - known], version)
        gaps = [gap for gap in update.gaps.values() if gap is not None]
        return SyncReport(
            version=version,
            mode=self._mode(servers),
            seconds=time.monotonic() - began,
            hold_s=update.hold_s,
            gap_max=max((gap.largest for gap in gaps), default=None),
            gap_mean=sum(gap.mean for gap in gaps) / len(gaps) if gaps else None,
            failed=failed,
        )

    def _reached(self, addresses: Iterable[str]) -> tuple[list[RolloutServer], dict[str, str]]:
        """The servers that answer, and for each of the others the reason why it cannot be published to."""

        def reach(address: str) -> RolloutServer | ServerFailed:
            try:
                http = ServerHttp(address, key=self._key, timeout_s=self.config.timeout_s, cut=self._cut)
                return identify(http, self.config.via)
            except ServerFailed as error:
                return error

        asked = list(addresses)
        found = dict(zip(asked, for_each_in_threads(reach, asked), strict=True))
        failed = {address: str(error) for address, error in found.items() if isinstance(error, ServerFailed)}
        return [server for server in found.values() if isinstance(server, RolloutServer)], failed

    def _choose_adapters(self, servers: Iterable[RolloutServer], rank: int | None) -> dict[str, str]:
        """Sets which servers take an adapter of this rank by itself; returns those that must, by `sync.lora`, and
        cannot, with the reason."""
        failed: dict[str, str] = {}
        for server in servers if rank is not None else ():
            assert rank is not None
            why = self._why_no_adapter(server, rank)
            server.by_adapter = why is None
            if why is not None and self.config.lora == "adapter":
                failed[server.address] = f"sync.lora is adapter, and {server.address} gets none: {why}"
            elif why is not None and server.address not in self._merged_to:
                self._merged_to.add(server.address)
                log.info("%s gets all weights with the adapter merged: %s", server.address, why)
        return failed

    def _why_no_adapter(self, server: RolloutServer, rank: int) -> str | None:
        if self.config.lora == "merged":
            return "sync.lora is merged"
        if self.config.gateway is None:
            return "without a gateway nobody sends calls to the newest adapter"
        if self.config.mode == "keep":
            return "calls that mode: keep froze would go on under the old adapter"
        return server.why_no_adapter(rank)

    def _choose_cuda_ipc(
        self, servers: Iterable[RolloutServer], weights: Mapping[str, torch.Tensor] | AdapterWeights
    ) -> dict[str, str]:
        """Sets which servers take these weights from the trainer's GPU; returns those that must, by `sync.via`, and
        cannot, with the reason."""
        failed: dict[str, str] = {}
        if self.config.via not in ("auto", "cuda_ipc"):
            return failed
        device = device_of(weights.tensors if isinstance(weights, AdapterWeights) else weights)
        for server in servers:
            if server.by_adapter or not server.shared:
                continue
            why = "the trainer's weights are on several devices" if device is None else server.why_no_cuda_ipc(device)
            server.cuda_ipc = why is None
            if why is not None and self.config.via == "cuda_ipc":
                failed[server.address] = f"sync.via is cuda_ipc: {why}"
            elif why is not None and self._not_by_gpu.get(server.address) != why:
                log.info("%s gets weights by shared memory: %s", server.address, why)
            self._not_by_gpu[server.address] = why
        return failed

    def _delivery(
        self, weights: Mapping[str, torch.Tensor] | AdapterWeights, version: int, servers: Sequence[RolloutServer]
    ) -> WeightDelivery:
        """The weights on their way; by shared memory where the GPU has no room for a block of them."""
        import torch

        try:
            return WeightDelivery(weights, version, self._transport(servers), self.config.folder)
        except torch.OutOfMemoryError:
            if not any(server.cuda_ipc for server in servers):
                raise
        log.warning("the GPU has no room for a copy of the weights; version %d goes by shared memory", version)
        for server in servers:
            server.cuda_ipc = False
        return WeightDelivery(weights, version, self._transport(servers), self.config.folder)

    def _transport(self, servers: Sequence[RolloutServer]) -> WeightTransport:
        whole = [server for server in servers if not server.by_adapter]
        return WeightTransport(
            cuda_ipc=any(server.cuda_ipc for server in whole),
            shared=any(server.shared and not server.cuda_ipc for server in whole),
            files=not all(server.shared for server in whole),
            adapter=len(whole) < len(servers),
            dtype=self._agreed_dtype(whole),
            tied_head=not all(isinstance(server, HeadraceEngine) and server.tied() for server in whole),
        )

    def _agreed_dtype(self, servers: Iterable[RolloutServer]) -> str | None:
        """What weights travel in: what all of these servers compute in, or what `sync.dtype` says; None: as they are,
        since servers differ or do not say."""
        if self.config.dtype != "auto":
            self._dtype = self.config.dtype
        else:
            found = {server.dtype for server in servers}
            self._dtype = found.pop() if len(found) == 1 else None
        return self._dtype

    def _mode(self, servers: Iterable[RolloutServer]) -> Mode:
        if self.config.mode != "auto":
            return self.config.mode
        return "keep" if all(isinstance(server, HeadraceEngine) for server in servers) else "abort-resume"

    def _note(self, address: str, reason: str) -> None:
        log.error("rollout server taken out: %s", reason)
        self._taken_out[address] = reason

    def _add_back(self, servers: Iterable[RolloutServer], version: int) -> None:
        for server in servers:
            self._control.add_server(server.address)
            self._control.set_version(server.address, version, server.adapter)
            log.warning("rollout server %s is back, with version %d", server.address, version)
            del self._taken_out[server.address]


def _none(what: str, failed: Mapping[str, str]) -> str:
    return f"{what}: {'; '.join(failed.values()) or 'there is no rollout server'}"


class WeightUpdate:
    """From the pause to the resume: all servers at once load and verify one version; then those that failed are taken
    out. `run` once; then `gaps` has the servers that took it, `failed` the others.

    However it ends, calls go on only to servers that are known to have the new weights. Where none is left they go on
    too: a gateway without servers samples nothing, and its 503 tells an agent more than silence would.
    """

    def __init__(
        self,
        control: CallControl,
        servers: Sequence[RolloutServer],
        held: dict[str, bool],
        mode: Mode,
        delivery: WeightDelivery,
    ) -> None:
        """`held` has the servers that the control knows, and whether its pause pauses their calls in flight."""
        self._control, self._servers, self._held = control, servers, held
        self._mode, self._delivery = mode, delivery
        self.gaps: dict[str, Gap | None] = {}
        self.failed: dict[str, str] = {}
        self.hold_s = 0.0

    def run(self, probe: Probe | None, most: float | None) -> None:
        """Pauses, loads and resumes; verifies by `probe` where there is one. `most` is the largest gap allowed; None:
        that of the precision."""
        began = time.monotonic()
        self._control.pause(self._mode, self._servers)
        try:
            for_each_in_threads(lambda server: self._load_and_verify(server, probe, most), self._servers)
        finally:
            self._remove_failed_and_resume()
            self.hold_s = time.monotonic() - began
        for_each_in_threads(self._settle, self._verified())

    def _load_and_verify(self, server: RolloutServer, probe: Probe | None, most: float | None) -> None:
        known, version = server.address in self._held, self._delivery.version
        try:
            if not self._held.get(server.address):
                server.pause("abort")
            server.set_version(UNVERIFIED)  # whatever becomes of this process, nobody uses it before it is verified
            server.load(self._delivery)
            gap = None
            if probe is not None:
                if not server.scores_paused:
                    if known and self._mode == "keep":  # what was frozen goes on here, and is of this version
                        server.set_version(str(version))
                        self._control.set_version(server.address, version)
                    server.resume()
                gap = self._gap(server, probe, most)
            server.set_version(str(version))
        except ServerFailed as error:
            self.failed[server.address] = str(error)
            return
        if known:
            self._control.set_version(server.address, version, server.adapter)
        self.gaps[server.address] = gap

    def _gap(self, server: RolloutServer, probe: Probe, most: float | None) -> Gap:
        found, dtype = server.score(list(probe.ids))
        gap = probe.gap(found)
        allowed = Gap(most, most) if most is not None else tolerance(probe, self._delivery.dtype, probe.dtype, dtype)
        if not gap.within(allowed):
            raise ServerFailed(
                f"{server.address} does not have the weights it was given: a log-prob is {gap.largest:.2g} off the "
                f"trainer's, {gap.mean:.2g} in the mean, where {allowed.largest:.2g} and {allowed.mean:.2g} are "
                "allowed (sync.tolerance; tied embeddings on vLLM and another --dtype are the usual reasons)"
            )
        return gap

    def _remove_failed_and_resume(self) -> None:
        wrong = [server for server in self._servers if server.address not in self.gaps]
        for server in wrong:
            self.failed.setdefault(server.address, f"{server.address} was being loaded when the sync was interrupted")
        for_each_in_threads(_discard, wrong)
        try:
            for server in wrong:
                self._control.remove_server(server.address)
            self._control.resume(self._verified())
        except BaseException:
            for_each_in_threads(self._resume, self._verified())  # they may go on, whatever became of the gateway
            raise

    def _verified(self) -> list[RolloutServer]:
        return [server for server in self._servers if server.address in self.gaps]

    def _settle(self, server: RolloutServer) -> None:
        """Resumes a server, and has it unload what no call uses any more: those in flight ended or were aborted."""
        self._resume(server)
        try:
            server.unload_others()
        except ServerFailed as error:
            log.warning("%s", error)  # it takes memory there, and is tried again at the next publish

    def _resume(self, server: RolloutServer) -> None:
        """Resumes a server itself: a gateway that was restarted meanwhile does not know that it is paused."""
        try:
            server.resume()
        except ServerFailed as error:
            log.warning("%s", error)


def _discard(server: RolloutServer) -> None:
    try:
        server.discard()
    except ServerFailed as error:
        log.info("%s", error)  # it cannot even be told: nothing of it is waited for
