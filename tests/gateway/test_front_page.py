"""What a browser sees at a server's root: how it is and where to look, and nothing that needs a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.gateway.kit import Running, running_gateway, serving, told, until

from headrace import DataPool
from headrace.api.app import create_app as create_api
from headrace.api.settings import TrajectoryApiSettings as ApiSettings
from headrace.pool.http import create_app as create_pool

#: What a browser sends, and what a program does.
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
NOWHERE = "http://127.0.0.1:1"


def test_a_browser_gets_a_page_and_a_program_the_json(gateway: Running, base: str) -> None:
    told(gateway.post(f"{base}/v1/chat/completions", {"messages": [{"role": "user", "content": "my secret prompt"}]}))
    assert told(gateway.get("/")) == {"message": "Headrace Trajectory API"}
    page = gateway.get("/", headers=BROWSER)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "Ready: calls are taken." in page.text
    (server,) = told(gateway.get("/servers"))["servers"]
    for shown in (server["address"], "<td>train</td>", 'href="/metrics"', f"{gateway.address}/init_trajectory"):
        assert shown in page.text
    assert "my secret prompt" not in page.text
    assert "<script" not in page.text
    for path in ("/docs", "/ready", "/health", "/stats", "/metrics", "/servers", "/pool/stats", "/status"):
        assert f'href="{path}"' in page.text
        assert gateway.get(path).status_code == 200


@pytest.mark.parametrize("key", [None, "wrong", "admin-key"])
def test_with_keys_a_page_shows_servers_and_channels_to_the_admin_alone(folder: Path, key: str | None) -> None:
    keys: dict[str, Any] = {"api_key": "agent-key", "reward_key": "reward-key", "admin_key": "admin-key"}
    with DataPool() as pool, running_gateway(pool, NOWHERE, folder, until_ready=False, **keys) as gateway:
        until(lambda: "waiting for rollout server" in gateway.get("/ready").text)
        headers = BROWSER if key is None else {**BROWSER, "authorization": f"Bearer {key}"}
        page = gateway.get("/", headers=headers)
        assert gateway.get("/").status_code == 401
    assert page.status_code == 200
    assert f"waiting for rollout server {NOWHERE}" in page.text
    assert ("<h2>Channels</h2>" in page.text) == (key == "admin-key")
    assert not any(secret in page.text for secret in keys.values())


def test_what_a_page_shows_is_escaped() -> None:
    with DataPool(channels={"<b>bold</b>": {}}) as pool, serving(create_pool(pool), lifespan=False) as address:
        page = httpx.get(address, headers=BROWSER, timeout=120, trust_env=False)
        assert "&lt;b&gt;bold&lt;/b&gt;" in page.text
        assert "<b>" not in page.text
        assert told(httpx.get(address, timeout=120, trust_env=False)) == {"message": "Headrace pool"}


@pytest.mark.parametrize("key", [None, "s3cret"])
def test_the_trajectory_api_alone_has_a_page_too(key: str | None) -> None:
    with DataPool() as pool, serving(create_api(pool, ApiSettings(api_key=key))) as address:
        page = httpx.get(address, headers=BROWSER, timeout=120, trust_env=False)
    assert "<h1>Trajectory API</h1>" in page.text
    assert ("Groups of environments" in page.text) == (key is None)
