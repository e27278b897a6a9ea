"""One HTTP server, asked one question at a time, and the errors of a sync. An answer other than 200 is `ServerFailed`,
with the server's words: one server's failure takes that server out; without any server left, it is `SyncFailed`.

A question is waited for until it is answered, its time is over, or the sync is cut short; then only what settles it is
still asked, and briefly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.data.errors import HeadraceError
from headrace.net.blocking_client import BlockingHttpClient
from headrace.net.http_answer import JSON_TYPE, BadAddress, NoAnswer
from headrace.trainer.stopping import Stopped, StopSignal, in_thread


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


#: Seconds that a question may take once a sync is cut short: what is well answers in far less, and somebody waits for
#: the process to end.
CUT_ANSWER_S = 1.0
#: Said also where there is no body: servers differ in when they ask for it.
SENT_HEADERS = {"content-type": JSON_TYPE}


class ServerHttp:
    """JSON to and from one server. Blocking, without state: many threads may ask at once."""

    def __init__(self, address: str, *, key: str | None, timeout_s: float, cut: StopSignal | None = None) -> None:
        """`cut`, once it is set, ends every question that is not answered. Raises `ServerFailed` for no address."""
        self.address = address
        try:
            self._client = BlockingHttpClient(address, timeout_s=timeout_s, key=key)
        except BadAddress as error:
            raise ServerFailed(str(error)) from None
        self._timeout_s = timeout_s
        self._cut = cut or StopSignal()

    def get(self, path: str, within_s: float | None = None) -> Any:
        """`ask` without a body."""
        return self.ask("GET", path, None, within_s)

    def post(self, path: str, body: Any = None, within_s: float | None = None) -> Any:
        """`ask` with `body` as JSON."""
        return self.ask("POST", path, body, within_s)

    def tell(self, path: str, body: Any) -> None:
        """Posts `body`; whatever the answer says beside its status is not read."""
        self.ask("POST", path, body, read=False)

    def ask(self, method: str, path: str, body: Any = None, within_s: float | None = None, *, read: bool = True) -> Any:
        """The answer's JSON; None where it is empty, or not to be read."""
        timeout_s = self._timeout_s if within_s is None else min(within_s, self._timeout_s)
        if self._cut.is_set():
            timeout_s = min(timeout_s, CUT_ANSWER_S)
        asked = in_thread(lambda: self._ask(method, path, body, timeout_s, read), "headrace-ask")
        try:
            return self._cut.result(asked, grace_s=CUT_ANSWER_S)
        except Stopped:
            route = path.partition("?")[0]
            raise ServerFailed(f"{self.address} had not answered {route} when the run was stopped") from None

    def _ask(self, method: str, path: str, body: Any, timeout_s: float, read: bool) -> Any:
        try:
            answer = self._client.request(method, path, json=body, headers=SENT_HEADERS, timeout_s=timeout_s)
        except NoAnswer as error:
            raise ServerFailed(str(error), reason=error.reason.lower()) from error
        route, status = path.partition("?")[0], answer.status
        if status != 200:
            said = answer.error_text() or "nothing"
            raise ServerFailed(f"{self.address} answered {route} with {status}: {said}", status, reason=said)
        try:
            return answer.json() if answer.body and read else None
        except ValueError:
            raise ServerFailed(f"{self.address} answered {route} with what is no JSON", status) from None
