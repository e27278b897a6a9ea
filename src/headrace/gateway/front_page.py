"""A gateway's front page."""

from __future__ import annotations

from starlette.requests import Request

from headrace.data.errors import HeadraceError
from headrace.gateway.access import Role
from headrace.gateway.gateway import Gateway
from headrace.net.front_page import (
    KEY_NEEDED,
    channels,
    code,
    links,
    page,
    table,
    text,
)
from headrace.pool.embedded import DataPool
from headrace.pool.errors import Unauthorized

LINKS = {
    "/docs": "every route, with its request and answer",
    "/ready": "200 once calls are taken, 503 with the reason before",
    "/health": "whether steps reach the pool",
    "/stats": "the pool's ledger and the gateway's counters",
    "/metrics": "the same for Prometheus",
    "/servers": "the rollout servers, as the gateway finds them",
    "/pool/stats": "the pool alone",
    "/status": "the Trajectory API: its step and its queue",
}


async def gateway_page(gateway: Gateway, request: Request) -> bytes:
    """What runs here. Readiness is for everyone, as `/ready` and `/health` are; servers and the pool for the admin."""
    waits, trouble = gateway.why_not_ready, gateway.trouble
    state = waits or (f"Ready, but degraded: {trouble}" if trouble else "Ready: calls are taken.")
    own = " and pool" if isinstance(gateway.pool, DataPool) else ""
    origin = str(request.base_url).rstrip("/")
    agents = {
        "begin a trajectory": f"curl -X POST {origin}/init_trajectory",
        "an agent's base_url": f"{origin}/TRAJECTORY/PROMPT/v1",
    }
    if gateway.settings.open:
        agents["a live service's base_url"] = f"{origin}/v1"
    sections = [code("An agent connects", agents), *await _inside(gateway, request), links("Where to look", LINKS)]
    return page(f"Gateway{own}, with the Trajectory API", state, sections, good=waits is None and trouble is None)


async def _inside(gateway: Gateway, request: Request) -> list[str]:
    try:
        gateway.access.check(request, Role.ADMIN)
    except Unauthorized:
        return [text("Rollout servers and channels", KEY_NEEDED)]
    rows = [
        {
            **{name: found[name] for name in ("address", "state", "model", "version", "in_flight", "calls")},
            "reason": found["reason"],
        }
        for found in gateway.models.servers()
    ]
    servers = table("Rollout servers", rows, "None.")
    try:
        return [servers, channels(await gateway.pool.aio.stats())]
    except HeadraceError as error:
        return [servers, text("Channels", f"The pool does not answer: {error}")]
