"""A browser, and dashboards that it looks at."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests import venvs

from headrace import DataPool
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.login import DashboardLogin
from headrace.dashboard.routes import PATH, dashboard_app
from headrace.dashboard.source import RunningPool
from headrace.net.server import Server

#: Milliseconds that a page may take on a machine that is busy.
PATIENCE_MS = 120_000

#: Serves a pool's dashboard and gives its address: `with serving(pool, key=...) as address`.
Serving = Callable[..., Any]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium; the tests that use it are a tier of their own."""
    program = os.environ.get("HEADRACE_CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium is on the PATH, and HEADRACE_CHROMIUM names none")
    venvs.provide_playwright()
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found]

    with sync_playwright() as playwright:
        # Tests may run as root, for whom Chromium has no sandbox; what is shown is our own page.
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of its own. A script of the page's that fails, or breaks the content security policy, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    opened = context.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on(
        "console",
        lambda said: (
            wrong.append(said.text) if said.type == "error" and "Failed to load resource" not in said.text else None
        ),
    )
    yield opened
    context.close()
    assert wrong == []


@contextmanager
def serve(
    pool: DataPool, *, key: str | None = None, port: int = 0, editable: bool = False, **options: Any
) -> Iterator[str]:
    """A dashboard of a pool, in a thread; yields its address."""
    source = RunningPool(pool, "a pool of tests", editable=editable)
    app = dashboard_app(Dashboard(source, **options), DashboardLogin(key))
    server = Server(app, "127.0.0.1", port, lifespan=True)
    ready = threading.Event()
    thread = threading.Thread(target=_run, args=(server, ready), daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield server.address + PATH
    finally:
        server.stop()
        thread.join(60)


def _run(server: Server, ready: threading.Event) -> None:
    server.run(lambda address: ready.set())


@pytest.fixture
def serving() -> Serving:
    return serve
