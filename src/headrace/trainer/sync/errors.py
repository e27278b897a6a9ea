"""What can go wrong: one server's failure takes that server out; without any server left, it is `SyncFailed`."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.data.errors import HeadraceError


class SyncFailed(HeadraceError):
    """No rollout server samples from the new weights; `reasons` has each one's, by address."""

    code = "sync_failed"

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})


class ServerFailed(HeadraceError):
    """A server that did not do what it was asked; `status` is its answer's, where there was one. `reason` is the
    message without the address."""

    code = "server_failed"

    def __init__(self, message: str, status: int | None = None, *, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason or message
