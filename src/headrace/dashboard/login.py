"""Who may look: a key that is posted once, and a signed cookie that stands for it from then on.

The cookie holds when it ends and a signature made with the key, so that any process that knows the key can check it and
none need remember it. Another key makes every cookie void.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import deque
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from headrace.net.server import presented_key

COOKIE = "headrace_dashboard"
#: Seconds for which a login holds.
SESSION_S = 12 * 3600
#: Wrong keys that are taken in a minute, from all callers together; a key cannot be guessed by trying.
MAX_WRONG, WRONG_WINDOW_S = 20, 60.0
#: What the page's own requests that change something carry: a form of another site cannot, without being asked first.
REQUEST_HEADER = "x-headrace-dashboard"


class DashboardLogin:
    """The key of a dashboard. `key` None: it is open. `closed` says why nobody may look, whatever the key."""

    def __init__(
        self,
        key: str | None,
        *,
        path: str = "/dashboard",
        closed: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._key = None if key is None else key.encode()
        self._path, self.closed, self._clock = path, closed, clock
        self._wrong: deque[float] = deque(maxlen=MAX_WRONG)

    def admits(self, request: Request) -> bool:
        """Whether a request may look: by its cookie, or by the key itself in a header, as programs send it."""
        if self.closed is not None:
            return False
        if self._key is None:
            return True
        return hmac.compare_digest(presented_key(request), self._key) or self._signed(request.cookies.get(COOKIE, ""))

    @property
    def exhausted(self) -> bool:
        """Whether so many wrong keys came in the last minute that none is tried now."""
        return len(self._wrong) == MAX_WRONG and self._clock() - self._wrong[0] < WRONG_WINDOW_S

    def opens(self, key: str) -> bool:
        """Whether it is the key; a wrong one is counted."""
        if self.closed is None and (self._key is None or hmac.compare_digest(key.encode(), self._key)):
            return True
        self._wrong.append(self._clock())
        return False

    def admit(self, request: Request, response: Response) -> None:
        """Gives a response the cookie."""
        end = str(int(self._clock()) + SESSION_S)
        secure = request.url.scheme == "https"
        response.set_cookie(
            COOKIE,
            f"{end}.{self._signature(end)}",
            max_age=SESSION_S,
            path=self._path,
            secure=secure,
            httponly=True,
            samesite="strict",
        )

    def dismiss(self, response: Response) -> None:
        """Takes the cookie away."""
        response.delete_cookie(COOKIE, path=self._path, httponly=True, samesite="strict")

    def _signed(self, cookie: str) -> bool:
        end, _, signature = cookie.partition(".")
        if not (end.isascii() and end.isdecimal() and len(end) < 20):
            return False
        return hmac.compare_digest(signature.encode(), self._signature(end).encode()) and int(end) > self._clock()

    def _signature(self, end: str) -> str:
        return hmac.new(self._key or b"", f"headrace dashboard until {end}".encode(), hashlib.sha256).hexdigest()


def same_origin(request: Request) -> bool:
    """Whether a request comes from a page of this server, or from no page at all."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site not in (None, "same-origin", "none"):
        return False
    return origin is None or origin.partition("://")[2] == request.headers.get("host")
