from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.engine.kit import serving as serving_engine
from tests.gateway.kit import serving

from headrace import DataPool
from headrace.api import create_app


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[str]:
    """The base_url of a real engine."""
    torch.set_num_threads(1)
    with serving_engine(model=str(folder), served_model_name="tiny", logprobs_mode="processed_logprobs") as client:
        yield f"http://{client.host}/v1"


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
