"""Pausing and resuming calls while weights change: through the gateway, or, without one, in the servers themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol
from urllib.parse import urlencode

from headrace.trainer.stopping import Outage, StopSignal, for_each_in_threads
from headrace.trainer.sync.config import Mode, SyncConfig
from headrace.trainer.sync.http import ServerFailed, ServerHttp, SyncFailed
from headrace.trainer.sync.servers import STATUS_TIMEOUT_S, RolloutServer

#: Seconds between two questions to a gateway that is not ready.
READY_POLL_S = 0.25
#: A pause that its trainer does not end is ended by the gateway after so many times `timeout_s`.
PAUSE_LEASE_ANSWERS = 3
#: The rollout servers' word for each mode.
PAUSE_MODES: dict[Mode, Literal["keep", "wait", "abort"]] = {"keep": "keep", "drain": "wait", "abort-resume": "abort"}


class CallControl(Protocol):
    """Pauses calls, knows the servers, and is told their versions. Every method raises `SyncFailed` where it fails."""

    def await_ready(self) -> None:
        """Waits until the servers can be published to; `SyncFailed` where that takes too long, or the sync is cut."""

    def await_reachable(self) -> None:
        """Waits until there is any answer; `SyncFailed` as above."""

    def addresses(self) -> dict[str, bool]:
        """The servers' addresses, each with whether `pause` pauses its calls in flight too."""

    def newest(self) -> int:
        """The newest version that was set."""

    def pause(self, mode: Mode, servers: Collection[RolloutServer]) -> None:
        """Pauses calls; where it raises, none is paused."""

    def resume(self, servers: Collection[RolloutServer]) -> None:
        """Resumes calls, to these servers."""

    def set_version(self, address: str, version: int, adapter: str | None = None) -> None:
        """Sets the version that a server samples with from this call on, and the adapter that it samples it with."""

    def remove_server(self, address: str) -> None:
        """Stops sending calls to a server; one that is not known is no error."""

    def add_server(self, address: str) -> None:
        """Sends calls to a removed server again."""


class GatewayControl(CallControl):
    """Control through Headrace's gateway, which pauses and resumes the servers that it uses for one of its models:
    `sync.model`, or the default. Its other models' servers are left alone."""

    def __init__(self, config: SyncConfig, cut: StopSignal, outage: Outage) -> None:
        assert config.gateway is not None
        self._http = ServerHttp(config.gateway, key=config.presented_key, timeout_s=config.timeout_s, cut=cut)
        self._model = config.model or ""  # empty: the gateway's default
        self._timeout_s, self._cut, self._outage = config.timeout_s, cut, outage

    def await_ready(self) -> None:
        """Waits for `/ready`: a gateway that is starting loads a tokenizer first, and one that is not there yet may
        come. One whose servers were left paused waits for a publish itself."""
        self._ask_again("GET", "/ready", None, None, 503, unless=self._has_paused_server)

    def await_reachable(self) -> None:
        """Waits for any answer. The gateway need not be ready: where it has no server left, publishing weights brings
        one back."""
        self._ask_again("GET", self._of_model("/policy_version"), None, None)

    def _has_paused_server(self) -> bool:
        return any(server["state"] == "paused" for server in self._servers())

    def _servers(self) -> list[dict[str, Any]]:
        """What the gateway tells of each of the model's servers."""
        own = self._versions()["servers"]
        found = self._ask("GET", "/servers", within_s=STATUS_TIMEOUT_S)["servers"]
        return [server for server in found if server["address"] in own]

    def _versions(self) -> dict[str, Any]:
        """The model's newest version, and that of each of its servers."""
        found: dict[str, Any] = self._ask("GET", self._of_model("/policy_version"), within_s=STATUS_TIMEOUT_S)
        return found

    def _of_model(self, path: str, **query: str) -> str:
        """The path of a request that concerns this model alone."""
        return f"{path}?{urlencode({**query, 'model': self._model})}"

    def _ask_again(
        self, method: str, path: str, body: Any, *passing: int | None, unless: Callable[[], bool] = lambda: False
    ) -> None:
        """Repeats a request while the answer's status is among `passing` (None: no answer), for at most `timeout_s`,
        and until `unless` holds, which is asked where there is an answer."""
        while True:
            try:
                self._ask(method, path, body, within_s=STATUS_TIMEOUT_S)
                self._outage.answered()
                return
            except SyncFailed as error:
                cause = error.__cause__
                if not isinstance(cause, ServerFailed) or cause.status not in passing or self._cut.is_set():
                    raise
                if cause.status is not None and unless():
                    return
                if self._outage.failed(cause.reason) > self._timeout_s or self._cut.wait(READY_POLL_S):
                    raise

    def addresses(self) -> dict[str, bool]:
        # One that is leaving ends its calls under the weights that they began with.
        found = [server for server in self._servers() if server["state"] != "leaving"]
        return {server["address"]: server["state"] == "up" for server in found}

    def newest(self) -> int:
        return int(self._versions()["version"])

    def pause(self, mode: Mode, servers: Collection[RolloutServer]) -> None:
        try:
            lease_s = f"{PAUSE_LEASE_ANSWERS * self._timeout_s:g}"
            self._ask("POST", self._of_model("/pause", mode=mode, lease_s=lease_s))
        except BaseException:
            try:
                self._ask("POST", self._of_model("/resume"), within_s=STATUS_TIMEOUT_S)
            except SyncFailed:  # the first error says more
                for_each_in_threads(_try_resume, servers)  # it may have paused them before it went, and nobody else did
            raise

    def resume(self, servers: Collection[RolloutServer]) -> None:
        self._ask("POST", self._of_model("/resume"))

    def set_version(self, address: str, version: int, adapter: str | None = None) -> None:
        # The gateway tells its pool, which may be started anew just now: no reason to give a server up that has the
        # weights. Telling it twice changes nothing.
        told = {"version": version, "server": address, "adapter": adapter, "model": self._model}
        self._ask_again("POST", "/policy_version", told, None, 503)

    def remove_server(self, address: str) -> None:
        asked = {"address": address, "model": self._model}
        self._ask("DELETE", "/servers", asked, unless=404)  # it has none of this address

    def add_server(self, address: str) -> None:
        self._ask("POST", "/servers", {"address": address, "model": self._model})

    def _ask(
        self, method: str, path: str, body: Any = None, *, within_s: float | None = None, unless: int | None = None
    ) -> Any:
        try:
            return self._http.ask(method, path, body, within_s)
        except ServerFailed as error:
            if error.status is not None and error.status == unless:
                return None
            way_out = {
                401: "; set sync.admin_key, or HEADRACE_ADMIN_KEY, to the gateway's --admin-key",
                404: "; is sync.gateway the address of a Headrace gateway?"
                if not self._model
                else "; is sync.gateway the address of a Headrace gateway, and sync.model one of its recorded models?",
            }
            raise SyncFailed(f"the gateway {error}{way_out.get(error.status or 0, '')}") from error


class DirectControl(CallControl):
    """Control of the servers themselves. Calls wait inside them, an answer that was aborted is not continued, and a
    removed server stays paused."""

    def __init__(self, config: SyncConfig) -> None:
        self._addresses = dict.fromkeys(config.servers, True)

    def await_ready(self) -> None:
        pass  # each is asked by itself

    def await_reachable(self) -> None:
        pass

    def addresses(self) -> dict[str, bool]:
        return self._addresses

    def newest(self) -> int:
        return 0  # each server knows its own, and takes any

    def pause(self, mode: Mode, servers: Collection[RolloutServer]) -> None:
        try:
            for_each_in_threads(lambda server: server.pause(PAUSE_MODES[mode]), servers)
        except BaseException as error:
            for_each_in_threads(_try_resume, servers)
            if isinstance(error, ServerFailed):
                raise SyncFailed(f"no pause: {error}") from error
            raise

    def resume(self, servers: Collection[RolloutServer]) -> None:
        for_each_in_threads(_try_resume, servers)

    def set_version(self, address: str, version: int, adapter: str | None = None) -> None:
        pass  # the server itself was told; the pool is for whoever publishes to tell

    def remove_server(self, address: str) -> None:
        pass  # it was left paused

    def add_server(self, address: str) -> None:
        pass


def _try_resume(server: RolloutServer) -> None:
    try:
        server.resume()
    except ServerFailed:
        pass  # it is gone: the next publish says so


def call_control(config: SyncConfig, cut: StopSignal, outage: Outage) -> CallControl:
    """The control that a configuration asks for. Setting `cut` ends every wait; `outage` is told whether the gateway
    answers."""
    return DirectControl(config) if config.gateway is None else GatewayControl(config, cut, outage)
