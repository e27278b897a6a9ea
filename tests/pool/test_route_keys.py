"""Every route of a pool that is served alone, with its key, with a wrong one and with none."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.gateway.kit import serving
from tests.keys import DASHBOARD_CLOSED, DASHBOARD_OPEN, Opens, check_complete, doors, table

from headrace import DataPool
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.login import DashboardLogin
from headrace.dashboard.routes import add_dashboard
from headrace.dashboard.source import RunningPool
from headrace.pool.http import create_app
from headrace.pool.wire import encode_call

KEY = "the-pools-own"
ROUTES = table(
    {
        Opens.EVERYBODY: ["GET /", "GET /health", *DASHBOARD_OPEN],
        Opens.ADMIN: [
            *DASHBOARD_CLOSED,
            "POST /pool/call",
            *(f"GET /pool/{name}" for name in ("stats", "events", "groups", "trajectories", "steps")),
            "GET /pool/trajectories/{uid:path}",
        ],
    }
)
WRONG: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": f"Basic {KEY}"},
    {"authorization": KEY},
    {"x-api-key": KEY[:-1]},
    {"x-api-key": f"{KEY}\u00e9"},
    {"cookie": f"key={KEY}"},
]
RIGHT = [{"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}]


@pytest.fixture
def pool() -> Iterator[DataPool]:
    with DataPool() as found:
        yield found


@pytest.mark.parametrize("page", ["application/json", "text/html"])
def test_only_the_key_opens_what_is_not_everybodys(pool: DataPool, page: str) -> None:
    app = create_app(pool, key=KEY)
    add_dashboard(app, Dashboard(RunningPool(pool, "pool", editable=True)), DashboardLogin(KEY))
    check_complete(app.routes, ROUTES)
    body = encode_call("stats", {"channel": None})
    with serving(app) as address, httpx.Client(base_url=address, timeout=240, trust_env=False) as client:
        for method, path in doors(app.routes):
            for headers in (*WRONG, *RIGHT):
                sent = {name: value.encode("latin-1") for name, value in (headers | {"accept": page}).items()}
                where = path.replace("{uid:path}", "nobody").replace("{name:path}", "nobody")
                answer = client.request(method, where, headers=sent, content=body if method == "POST" else None)
                closed = ROUTES[method, path] is Opens.ADMIN and headers not in RIGHT
                told = f"{method} {path} with {headers}: {answer.status_code} {answer.text[:200]}"
                assert (answer.status_code == 401) == closed, told
                assert answer.status_code < 500, told
                assert KEY not in answer.text, told
                if headers not in RIGHT:
                    assert '"ledger"' not in answer.text, told
    assert pool.stats()["ledger"]["submitted"] == 0
