"""One HTTP server, asked one question at a time, and the errors of a sync. An answer other than 200 is `ServerFailed`,
with the server's words: one server's failure takes that server out; without any server left, it is `SyncFailed`. Who
has no other server asks again (`ask_again`).

A question is waited for until it is answered, its time is over, or the sync is cut short; then only what settles it is
still asked, and briefly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from headrace.data.errors import HeadraceError
from headrace.net.blocking_client import BlockingHttpClient
from headrace.net.http_answer import JSON_TYPE, BadAddress, NoAnswer, seconds_of
from headrace.trainer.stopping import Outage, Stopped, StopSignal, in_thread

T = TypeVar("T")

#: Statuses of a server that may do better another time: none at all, too busy, behind a proxy that waits for it.
PASSING = (None, 408, 425, 429, 500, 502, 503, 504)
#: Seconds between two tries at a server that does not answer: the second comes soon, for a connection that was lost.
RETRY_DELAYS_S = (0.05, 0.5, 2.0)


class SyncFailed(HeadraceError):
    """No rollout server samples from the new weights; `reasons` has each one's, by address."""

    code = "sync_failed"

    def __init__(self, message: str, reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})


class ServerFailed(HeadraceError):
    """A server that did not do what it was asked; `status` is its answer's, where there was one. `reason` is the
    message without the address, `retry_after_s` the seconds after which the server wants to be asked again."""

    code = "server_failed"

    def __init__(
        self, message: str, status: int | None = None, *, reason: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after_s = status, reason or message, retry_after_s


def ask_again(ask: Callable[[], T], stop: StopSignal, outage: Outage, patience_s: float = math.inf) -> T:
    """What `ask` returns, asked again while it raises `ServerFailed` with a status among `PASSING`, not before the time
    that the server names. Raises `Stopped` where the run is stopped first, and the last `ServerFailed` where its status
    is another, or the server has not answered for `patience_s`."""
    tries = 0
    while not stop.is_set():
        try:
            found = ask()
        except ServerFailed as error:
            if stop.is_set():
                break
            if error.status not in PASSING or outage.failed(error.reason) > patience_s:
                raise
            delay_s = max(RETRY_DELAYS_S[min(tries, len(RETRY_DELAYS_S) - 1)], error.retry_after_s or 0.0)
            stop.wait(min(delay_s, patience_s))
            tries += 1
        else:
            outage.answered()
            return found
    raise Stopped


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
            raise ServerFailed(
                f"{self.address} answered {route} with {status}: {said}",
                status,
                reason=said,
                retry_after_s=seconds_of(answer.headers.get("retry-after", "")),
            )
        try:
            return answer.json() if answer.body and read else None
        except ValueError:
            raise ServerFailed(f"{self.address} answered {route} with what is no JSON", status) from None
