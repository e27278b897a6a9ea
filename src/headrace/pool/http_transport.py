"""Frames to a pool in another process: over HTTP, and over a unix socket. Ray's transport is in `headrace.pool.ray`."""

from __future__ import annotations

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.net.async_client import AsyncHttpClient
from headrace.net.blocking_client import BlockingHttpClient
from headrace.net.http_answer import BadAddress, HttpAnswer, NoAnswer
from headrace.pool.remote import SLACK_S, Unreachable
from headrace.pool.wire import FRAME_TYPE

CALL_PATH = "/pool/call"
CALL_HEADERS = {"content-type": FRAME_TYPE}
#: Seconds that an awaitable connection is kept: a pool is called every few seconds, and its calls may arrive twice.
KEEP_ALIVE_S = 60.0


class HttpTransport:
    """Carries frames over HTTP, on kept connections: one a thread for blocking calls, an event loop's for awaitable
    ones. Frames may be of any size."""

    def __init__(self, address: str, key: str | None = None, *, socket_path: str | None = None) -> None:
        self.address = address.rstrip("/")
        try:
            self._blocking = BlockingHttpClient(
                address, timeout_s=SLACK_S, key=key, socket_path=socket_path, keep_alive=True, max_bytes=None
            )
        except BadAddress:
            raise InvalidInput(f"{address!r} is no pool's address; it looks like http://127.0.0.1:8200") from None
        self._async = AsyncHttpClient(
            address, total_s=SLACK_S, key=key, socket_path=socket_path, keep_alive_s=KEEP_ALIVE_S, max_bytes=None
        )

    def call(self, op: str, body: bytes, timeout: float) -> bytes:
        try:
            answer = self._blocking.request("POST", CALL_PATH, body, headers=CALL_HEADERS, timeout_s=timeout)
        except NoAnswer as error:
            raise Unreachable(error.reason) from error.__cause__
        return self._checked(answer)

    async def acall(self, op: str, body: bytes, timeout: float, *, waits: bool = True) -> bytes:
        try:
            answer = await self._async.request("POST", CALL_PATH, body, headers=CALL_HEADERS, total_s=timeout)
        except NoAnswer as error:
            raise Unreachable(error.reason) from error.__cause__
        return self._checked(answer)

    def _checked(self, answer: HttpAnswer) -> bytes:
        """The frame of an answer; raises the error that it tells of in its place."""
        if answer.content_type == FRAME_TYPE:
            return answer.body
        try:
            said = answer.json()
            error = HeadraceError.from_wire(said.get("code", "error"), str(said.get("detail", said)))
        except (ValueError, AttributeError):
            raise Unreachable(
                f"HTTP {answer.status} from {self.address}, which does not answer as a pool does"
            ) from None
        raise error

    def close(self) -> None:
        self._blocking.close()
        self._async.close_of_ended_loops()

    async def aclose(self) -> None:
        await self._async.close()


class UnixTransport(HttpTransport):
    """The same over a unix socket: processes of one machine, and nobody else."""

    def __init__(self, path: str) -> None:
        super().__init__("http://unix", socket_path=path)
        self.address = f"unix://{path}"
