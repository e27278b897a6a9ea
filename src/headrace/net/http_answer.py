"""What a client hears: a server's answer (`HttpAnswer`), or why there is none (`NoAnswer`).

An answer of any status is an answer; which ones are failures is the caller's to say.
"""

from __future__ import annotations

from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

import msgspec
import orjson

from headrace.data.errors import HeadraceError, InvalidInput

JSON_TYPE = "application/json"
#: Bytes of an answer that are read unless a caller says otherwise: the largest that are asked for (log-probs of a long
#: prompt, as JSON) have tens of millions, and one that never ends must not fill the memory.
MAX_ANSWER_BYTES = 256 << 20
#: Characters of an error's body that are quoted: a sentence or a list of wrong fields, and not a whole page of HTML.
MAX_ERROR_CHARS = 2000


#: Seconds that a `Retry-After` may ask for: what asks for more is no server that is only busy.
MAX_RETRY_AFTER_S = 3600.0


def seconds_of(retry_after: str | None) -> float | None:
    """The seconds that a `Retry-After` names, an hour at most; None where it names none (a date, or nonsense)."""
    text = (retry_after or "").strip()
    if not text.isascii() or not text.replace(".", "", 1).isdecimal():
        return None
    return min(float(text), MAX_RETRY_AFTER_S)


class AnswerHeaders(Protocol):
    """An answer's headers, by name in any case."""

    def get(self, name: str, default: str, /) -> str: ...


class HttpAnswer(msgspec.Struct, frozen=True):
    """An answer that was read whole."""

    status: int
    headers: AnswerHeaders
    body: bytes

    @property
    def content_type(self) -> str:
        """Its media type, without parameters; empty where it has none."""
        return self.headers.get("content-type", "").partition(";")[0].strip()

    def json(self) -> Any:
        """The body as JSON; raises `ValueError` where it is none."""
        return orjson.loads(self.body)

    def error_text(self) -> str:
        """What an error's body says, in whichever of the usual shapes (`error`, `detail`, `message`, nested or not);
        the body where it has none of them. No longer than a message should be."""
        try:
            found = self.json()
        except ValueError:
            return self.body[:MAX_ERROR_CHARS].decode(errors="replace")
        for name in ("error", "detail", "message"):
            if isinstance(found, dict) and found.get(name):
                found = found[name]
        try:
            return (found if isinstance(found, str) else orjson.dumps(found).decode())[:MAX_ERROR_CHARS]
        except TypeError:  # nested deeper than orjson writes
            return self.body[:MAX_ERROR_CHARS].decode(errors="replace")


class NoAnswer(HeadraceError):
    """A request that got no answer, or not all of one; the server may have acted on it all the same.

    The message has the address, the route and what happened; `reason` is what happened alone. `timed_out`: the time for
    it was over, also that for connecting. A path's query, in which keys may stand, is not named.
    """

    code = "no_answer"

    def __init__(self, message: str, reason: str = "", *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.reason, self.timed_out = reason or message, timed_out

    @classmethod
    def unreachable(cls, address: str, path: str, reason: str, *, timed_out: bool = False) -> NoAnswer:
        """No connection, or one that broke."""
        return cls(f"{address} cannot be reached{_route(path, ' for')}: {reason}", reason, timed_out=timed_out)

    @classmethod
    def late(cls, address: str, path: str, seconds: float | None) -> NoAnswer:
        """Not all of an answer in time."""
        reason = f"did not answer{_route(path)} within {seconds or 0:g} s"
        return cls(f"{address} {reason}", reason, timed_out=True)

    @classmethod
    def too_large(cls, address: str, path: str, limit: int) -> NoAnswer:
        """An answer with more bytes than are read."""
        reason = f"answered{_route(path)} with more than {limit} bytes"
        return cls(f"{address} {reason}", reason)


def _route(path: str, before: str = "") -> str:
    return f"{before} {path.partition('?')[0]}" if path else ""


class BadAddress(NoAnswer, InvalidInput):
    """An address that is none; it would be none another time."""

    code = "bad_address"

    @classmethod
    def of(cls, address: str) -> BadAddress:
        return cls(f"{address!r} is no server's address; it looks like http://HOST:PORT")


def split_address(address: str) -> SplitResult:
    """The parts of an HTTP server's address; raises `BadAddress` for what is none."""
    try:
        parts = urlsplit(address)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:  # a port that is no number, or brackets that do not close
        pass
    raise BadAddress.of(address)
