from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.kit import Client
from tests.gateway.kit import serving

from headrace import DataPool
from headrace.api import create_app


@pytest.fixture
def engine(engine: Client) -> str:
    """The base_url of a real engine."""
    return f"http://{engine.host}/v1"


@pytest.fixture
def trajectory_api() -> Iterator[str]:
    """The address of a real Trajectory API."""
    with DataPool() as pool, serving(create_app(pool)) as address:
        yield address


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's, which commands write to."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
