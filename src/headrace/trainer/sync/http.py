"""One HTTP server, asked one question at a time. What is not an answer with 200 is `ServerFailed`, with its words."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

import orjson

from headrace.data.errors import shown
from headrace.trainer.sync.errors import ServerFailed


class Http:
    """Blocking, without state: many threads may ask at once."""

    def __init__(self, address: str, *, key: str | None, timeout_s: float) -> None:
        self.address = address
        parts = urlsplit(address)
        self._make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._prefix = parts.netloc, parts.path
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._timeout_s = timeout_s

    def get(self, path: str, within_s: float | None = None) -> Any:
        return self.ask("GET", path, None, within_s)

    def post(self, path: str, body: Any = None, within_s: float | None = None) -> Any:
        return self.ask("POST", path, body, within_s)

    def ask(self, method: str, path: str, body: Any = None, within_s: float | None = None) -> Any:
        """The answer's JSON; None where it is empty."""
        timeout_s = self._timeout_s if within_s is None else min(within_s, self._timeout_s)
        connection = self._make(self._host, timeout=timeout_s)
        route = path.partition("?")[0]
        try:
            data = None if body is None else orjson.dumps(body)
            connection.request(method, self._prefix + path, data, self._headers)
            answer = connection.getresponse()
            status, text = answer.status, answer.read()
        except TimeoutError:
            raise ServerFailed(f"{self.address} did not answer {route} within {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            why = str(error) or type(error).__name__
            raise ServerFailed(f"{self.address} cannot be reached for {route}: {why}") from error
        finally:
            connection.close()
        try:
            found = orjson.loads(text) if text else None
        except ValueError:
            found = text.decode(errors="replace") if status != 200 else None
            if status == 200:
                raise ServerFailed(f"{self.address} answered {route} with what is no JSON", status) from None
        if status != 200:
            raise ServerFailed(f"{self.address} answered {route} with {status}: {_words(found)}", status)
        return found


def _words(found: Any) -> str:
    """What an error says, in whichever of the usual shapes."""
    if isinstance(found, dict):
        said = found.get("detail") or found.get("error") or found
        said = said.get("message", said) if isinstance(said, dict) else said
        return said if isinstance(said, str) else shown(said, 300)
    return found if isinstance(found, str) and found else "nothing"
