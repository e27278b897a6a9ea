"""Every route of a Trajectory API that is served alone, with its key, with a wrong one and with none."""

from __future__ import annotations

from tests.api.kit import Api
from tests.gateway.kit import serving
from tests.keys import DASHBOARD_CLOSED, DASHBOARD_OPEN, Opens, check_complete, doors, table

from headrace import DataPool
from headrace.api import TrajectoryApiSettings, create_app

KEY = "the-apis-own"
ROUTES = table(
    {
        Opens.EVERYBODY: DASHBOARD_OPEN,
        # A browser's front page needs none, and shows then where to look and nothing else.
        Opens.ADMIN: [
            *DASHBOARD_CLOSED,
            *(f"GET {path}" for path in ("/", "/wandb_info", "/info", "/batch", "/latest_example", "/status")),
            *("GET /status-env", "GET /reset_data", "POST /reset_data"),
            *(f"POST /{name}" for name in ("register", "register-env", "disconnect-env", "scored_data")),
            *("POST /scored_data_list", "GET /metrics", "GET /openapi.json", "GET /docs"),
        ],
    }
)


def test_only_the_key_opens_any_route(pool: DataPool) -> None:
    app = create_app(pool, TrajectoryApiSettings(api_key=KEY))
    check_complete(app.routes, ROUTES)
    with serving(app) as address:
        api = Api(address)
        for method, path in doors(app.routes):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"x-api-key": KEY}):
                answer = api.client.request(method, path.replace("{name:path}", "nobody"), headers=headers)
                where = f"{method} {path} with {headers}: {answer.status_code} {answer.text[:200]}"
                if (method, path) not in ROUTES:
                    assert answer.status_code == 405, where
                    continue
                closed = ROUTES[method, path] is Opens.ADMIN and headers.get("x-api-key") != KEY
                assert (answer.status_code == 401) == closed, where
                assert answer.status_code < 500, where
                assert KEY not in answer.text, where
        page = api.client.get("/", headers={"accept": "text/html"})
        assert page.status_code == 200
        assert "posted" not in page.text
        api.close()
    assert pool.stats()["desk"]["posted"] == 0
