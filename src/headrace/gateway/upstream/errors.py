"""What can go wrong with a rollout server: whose fault it is, whether to try again, and how its errors read."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from headrace.data.errors import HeadraceError, shown


class UpstreamRefused(HeadraceError):
    """The server answered 4xx: the request is at fault. `param` is the field, where the server names one."""

    code = "upstream_refused"

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param


class NoRolloutServer(HeadraceError):
    """No rollout server is left to try; worth another try in `retry_after_s`."""

    code = "no_rollout_server"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RolloutServerFailed(HeadraceError):
    """A server cannot be reached, hung, or answered what cannot be used. `kind` says which, for counters and
    retries: unreachable, hang, cut, malformed and the like."""

    code = "rollout_server_failed"

    def __init__(self, message: str, kind: str = "failed") -> None:
        super().__init__(message)
        self.kind = kind


class RolloutServerBusy(RolloutServerFailed):
    """The server answered 429; `retry_after_s` is when to try again, where it says so."""

    code = "rollout_server_busy"

    def __init__(self, message: str, kind: str = "busy", retry_after_s: float | None = None) -> None:
        super().__init__(message, kind)
        self.retry_after_s = retry_after_s


class CannotPause(HeadraceError):
    """A rollout server that cannot be paused or resumed; the message says what to start it with."""

    code = "cannot_pause"


class ErrorBody(msgspec.Struct):
    """The `error` object in a vLLM answer."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None


class MalformedAnswer(ValueError):
    """An answer that is JSON of the right shape but whose content cannot be right."""


class ServerFault(Exception):
    """An error that a server reported: its status, message and, where named, the field."""

    def __init__(self, status: int, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    @classmethod
    def of(cls, fault: ErrorBody) -> ServerFault:
        """The error that an answer's body holds."""
        code = fault.code if isinstance(fault.code, int) else 500
        return cls(code, fault.message or "no reason given", fault.param)


def read_fault(status: int, data: bytes) -> ServerFault:
    """The error in the body of an answer with an error status, whatever its shape."""
    try:
        found: Any = orjson.loads(data)
    except ValueError:
        found = " ".join(data.decode("utf-8", "replace").split())  # a proxy's page, say, on one line
    if isinstance(found, dict):
        found = found.get("error", found.get("detail", found.get("message", found)))
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        param = found.get("param")
        return ServerFault(status, found["message"], param if isinstance(param, str) else None)
    text = found if isinstance(found, str) else shown(found, 500)
    return ServerFault(status, text[:2000] or f"status {status} without a reason", None)
