"""What can go wrong with a rollout server, from an environment's side: whose fault it is, and whether to try again."""

from __future__ import annotations

from typing import Literal

from headrace.data.errors import HeadraceError

#: `down`: it is not there; `overloaded`: it has too much to do; `failed`: this one call went wrong.
Trouble = Literal["down", "overloaded", "failed"]


class ServerError(HeadraceError):
    """Any trouble with a rollout server."""

    code = "rollout_server_error"


class Unavailable(ServerError):
    """The server's fault: the same call may go well on another one, or later."""

    code = "rollout_server_unavailable"

    def __init__(self, message: str, trouble: Trouble = "failed") -> None:
        super().__init__(message)
        self.trouble = trouble


class RequestRefused(ServerError):
    """The server said 4xx: the call is at fault, and would be refused anywhere."""

    code = "rollout_server_refused"

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class NoTokens(ServerError, NotImplementedError):
    """The server cannot say which tokens it consumed and sampled."""

    code = "rollout_server_no_tokens"


class NoTokenizer(HeadraceError):
    """The tokenizer that is configured cannot be loaded."""

    code = "no_tokenizer"


class NoServer(ServerError):
    """No server came back within the time that was allowed."""

    code = "rollout_server_none"
