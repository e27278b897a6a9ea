"""One HTTP server, asked one question at a time, and the errors of a sync. An answer other than 200 is `ServerFailed`,
with the server's words: one server's failure takes that server out; without any server left, it is `SyncFailed`.

A question is waited for until it is answered, its time is over, or the sync is cut short; then only what settles it is
still asked, and briefly.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import orjson

from headrace.data.errors import HeadraceError, shown
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


class ServerHttp:
    """Blocking, without state: many threads may ask at once."""

    def __init__(self, address: str, *, key: str | None, timeout_s: float, cut: StopSignal | None = None) -> None:
        """`cut`, once it is set, ends every question that is not answered."""
        self.address = address
        self._cut = cut or StopSignal()
        parts = urlsplit(address)
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._prefix = parts.netloc, parts.path
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._timeout_s = timeout_s

    def get(self, path: str, within_s: float | None = None) -> Any:
        """`ask` without a body."""
        return self.ask("GET", path, None, within_s)

    def post(self, path: str, body: Any = None, within_s: float | None = None) -> Any:
        """`ask` with `body` as JSON."""
        return self.ask("POST", path, body, within_s)

    def ask(self, method: str, path: str, body: Any = None, within_s: float | None = None) -> Any:
        """The answer's JSON; None where it is empty."""
        timeout_s = self._timeout_s if within_s is None else min(within_s, self._timeout_s)
        if self._cut.is_set():
            timeout_s = min(timeout_s, CUT_ANSWER_S)
        asked = in_thread(lambda: self._ask(method, path, body, timeout_s), "headrace-ask")
        try:
            return self._cut.result(asked, grace_s=CUT_ANSWER_S)
        except Stopped:
            route = path.partition("?")[0]
            raise ServerFailed(f"{self.address} had not answered {route} when the run was stopped") from None

    def _ask(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        connection = self._make(self._host, timeout=timeout_s)
        route = path.partition("?")[0]
        try:
            data = None if body is None else orjson.dumps(body)
            connection.request(method, self._prefix + path, data, self._headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
        except TimeoutError:
            why = f"did not answer {route} within {timeout_s:g} s"
            raise ServerFailed(f"{self.address} {why}", reason=why) from None
        except (OSError, http.client.HTTPException) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            raise ServerFailed(f"{self.address} cannot be reached for {route}: {why}", reason=why.lower()) from error
        finally:
            connection.close()
        try:
            found = orjson.loads(text) if text else None
        except ValueError:
            found = text.decode(errors="replace") if status != 200 else None
            if status == 200:
                raise ServerFailed(f"{self.address} answered {route} with what is no JSON", status) from None
        if status != 200:
            words = _words(found)
            raise ServerFailed(f"{self.address} answered {route} with {status}: {words}", status, reason=words)
        return found


def _words(found: Any) -> str:
    """What an error says, in whichever of the usual shapes."""
    if isinstance(found, dict):
        said = found.get("detail") or found.get("error") or found
        said = said.get("message", said) if isinstance(said, dict) else said
        return said if isinstance(said, str) else shown(said, 300)
    return found if isinstance(found, str) and found else "nothing"
