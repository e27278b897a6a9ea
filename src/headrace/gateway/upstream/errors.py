"""What can go wrong with a rollout server: whose fault it is, whether to try again, and how its errors read."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from headrace.data.errors import HeadraceError, shown


class UpstreamRefused(HeadraceError):
    """The server said 4xx: the request is at fault, and its author is told."""

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
    """A server died, hung or answered nonsense after the first token, or wherever the order went."""

    code = "rollout_server_failed"

    def __init__(self, message: str, kind: str = "failed") -> None:
        super().__init__(message)
        self.kind = kind


class RolloutServerBusy(RolloutServerFailed):
    """The server has too much to do; it may say when to come again."""

    code = "rollout_server_busy"

    def __init__(self, message: str, kind: str = "busy", retry_after_s: float | None = None) -> None:
        super().__init__(message, kind)
        self.retry_after_s = retry_after_s


class CannotPause(HeadraceError):
    """A rollout server that cannot be paused or resumed; the message says what to start it with."""

    code = "cannot_pause"


class ErrorBody(msgspec.Struct):
    """An error as vLLM tells it."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None


class MalformedAnswer(ValueError):
    """An answer that is JSON of the right shape and still none."""


class ServerFault(Exception):
    """A server's own words about what went wrong."""

    def __init__(self, status: int, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    @classmethod
    def of(cls, fault: ErrorBody) -> ServerFault:
        code = fault.code if isinstance(fault.code, int) else 500
        return cls(code, fault.message or "no reason given", fault.param)


def read_fault(status: int, data: bytes) -> ServerFault:
    """What an answer with an error status says, in whatever shape it says it."""
    try:
        found: Any = orjson.loads(data)
    except ValueError:
        found = data.decode("utf-8", "replace").strip()
    if isinstance(found, dict):
        found = found.get("error", found.get("detail", found.get("message", found)))
    if isinstance(found, dict) and isinstance(found.get("message"), str):
        param = found.get("param")
        return ServerFault(status, found["message"], param if isinstance(param, str) else None)
    text = found if isinstance(found, str) else shown(found, 500)
    return ServerFault(status, text[:2000] or f"status {status} without a reason", None)
