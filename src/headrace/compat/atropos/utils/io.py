"""`atroposlib.utils.io`."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("headrace.compat")


async def parse_http_response(resp: Any, logger: logging.Logger | None = None) -> Any:
    """The JSON of an aiohttp response. An error status, or a body that is not JSON, is logged with its text and
    raised."""
    try:
        resp.raise_for_status()
        return await resp.json()
    except Exception as error:
        (logger or log).error("status %s: %s: %s", getattr(error, "status", "unknown"), error, await resp.text())
        raise
