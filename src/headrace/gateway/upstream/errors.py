"""What can go wrong with a rollout server, from the caller's side: whose fault it is, and whether to come back."""

from __future__ import annotations

from headrace.data.errors import HeadraceError


class Refused(HeadraceError):
    """The server said 4xx: the request is at fault, and its author is told."""

    code = "upstream_refused"

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param


class NoServer(HeadraceError):
    """No rollout server is left to try; worth another try in `retry_after_s`."""

    code = "no_rollout_server"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Failed(HeadraceError):
    """A server died, hung or answered nonsense after the first token, or wherever the order went."""

    code = "rollout_server_failed"

    def __init__(self, message: str, kind: str = "failed") -> None:
        super().__init__(message)
        self.kind = kind


class CannotPause(HeadraceError):
    """A rollout server that cannot be paused or resumed; the message says what to start it with."""

    code = "cannot_pause"
