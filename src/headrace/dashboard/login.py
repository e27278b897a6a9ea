"""Who may look: a key that is posted once, and a signed cookie that stands for it from then on.

The cookie holds when it ends and a signature made with the key, so that any process that knows the key can check it and
none need remember it. Another key makes every cookie void. Its name has the key's mark in it: browsers send a host's
cookies to each of its ports, and two dashboards of one host would otherwise overwrite each other's.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import deque
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from headrace.data.keys import usable_key
from headrace.net.server import presented_key

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
        key = usable_key(key, name="key")
        self._key = None if key is None else key.encode()
        self._path, self.closed, self._clock = path, closed, clock
        self.cookie = f"headrace_dashboard_{self._digest('name')[:8]}"
        self._wrong: deque[float] = deque(maxlen=MAX_WRONG)

    @property
    def keyed(self) -> bool:
        """Whether a key is asked for."""
        return self._key is not None

    def admits(self, request: Request) -> bool:
        """Whether a request may look: by its cookie, or by the key itself in a header, as programs send it."""
        if self.closed is not None:
            return False
        if self._key is None:
            return True
        if hmac.compare_digest(presented_key(request), self._key):
            return True
        return self._signed(request.cookies.get(self.cookie, ""))

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
            self.cookie,
            f"{end}.{self._digest(f'until {end}')}",
            max_age=SESSION_S,
            path=self._path,
            secure=secure,
            httponly=True,
            samesite="strict",
        )

    def dismiss(self, response: Response) -> None:
        """Takes the cookie away."""
        response.delete_cookie(self.cookie, path=self._path, httponly=True, samesite="strict")

    def _signed(self, cookie: str) -> bool:
        end, _, signature = cookie.partition(".")
        if not (end.isascii() and end.isdecimal() and len(end) < 20):
            return False
        expected = self._digest(f"until {end}")
        return hmac.compare_digest(signature.encode(), expected.encode()) and int(end) > self._clock()

    def _digest(self, said: str) -> str:
        return hmac.new(self._key or b"", f"headrace dashboard {said}".encode(), hashlib.sha256).hexdigest()


def same_origin(request: Request) -> bool:
    """Whether a request comes from a page of this server, or from no page at all."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site not in (None, "same-origin", "none"):
        return False
    return origin is None or origin.partition("://")[2] == request.headers.get("host")
