"""What a gateway refuses, and with which status. Every error of Headrace's has its place in one table.

A dialect writes the refusal in its own shape (OpenAI's `error` object); the other routes as `{"detail": ...}`.
"""

from __future__ import annotations

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.gateway.upstream.errors import NoRolloutServer, RolloutServerFailed, UpstreamRefused
from headrace.pool import errors as pool
from headrace.rewards.sample import RewardFailure

#: Seconds after which a client that met a passing trouble may try again.
RETRY_AFTER_S = 1


class Refusal(HeadraceError):
    """A request that is answered with an error, by its status."""

    code = "gateway_refused"

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = code
        self.param = param
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """OpenAI's `type` for the status."""
        return KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def not_ready(why: str) -> Refusal:
    """503: the gateway does not take calls yet; `why` says what it waits for."""
    return Refusal(why, 503, code="not_ready", retry_after=RETRY_AFTER_S)


def answered_elsewhere() -> Refusal:
    """503: another process has recorded an answer to this call, which was tried there too; the next try gets it."""
    why = "another try of this call was answered and recorded meanwhile; ask again under its name for that answer"
    return Refusal(why, 503, code="answered_elsewhere", retry_after=RETRY_AFTER_S)


def too_deep() -> Refusal:
    """400: the body is nested deeper than it can be read."""
    return Refusal("the body is nested too deep", 400, code="invalid_json")


def refusal(error: HeadraceError) -> Refusal:
    """The refusal that an error amounts to."""
    said = str(error)
    match error:
        case Refusal():
            return error
        case UpstreamRefused():
            return Refusal(said, error.status if 400 <= error.status < 500 else 400, param=error.param)
        case NoRolloutServer():
            return Refusal(said, 503, code="no_server", retry_after=error.retry_after_s)
        case RolloutServerFailed():
            return Refusal(said, 502, code="upstream_failed")
        case RewardFailure(reason="unavailable"):
            return Refusal(said, 503, code="reward_unavailable", retry_after=RETRY_AFTER_S)
        case RewardFailure(reason="timeout" | "bad_answer"):
            return Refusal(said, 502, code=error.code)
        case RewardFailure():
            return Refusal(said, 422, code=error.code)
        case InvalidInput():
            return Refusal(said, 400, code=error.code, param=getattr(error, "param", None))
        case pool.NotFound():
            return Refusal(said, 404, code=error.code)
        case pool.Conflict() | pool.LeaseLost():
            return Refusal(said, 409, code=error.code)
        case pool.Unauthorized():
            return Refusal(said, 401, code=error.code)
        case pool.PoolFull() | pool.PoolClosed() | pool.PoolUnreachable() | pool.JournalError():
            return Refusal(said, 503, code=error.code, retry_after=RETRY_AFTER_S)
        case _:
            return Refusal(said, 500, code=error.code)
