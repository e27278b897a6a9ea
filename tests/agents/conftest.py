"""These tests run where they are asked for (HEADRACE_AGENTS=1): the agents take 0.7 GB of disk, and npm to install."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.agents.kit import Place
from tests.gateway.rollout import Rollout, in_front
from tests.tokens import models
from tests.tokens.kit import STOPS

HERE = Path(__file__).parent
#: The first test may wait for an installation.
TIMEOUT_S = 1800
#: A model that reasons and calls tools, and whose tokens are large enough for an agent's long instructions.
MODEL = "qwen3"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "agents: runs command-line agents from npm (make test-agents)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = [item for item in items if HERE in item.path.parents]
    for item in found:
        item.add_marker(pytest.mark.agents)
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    if found and os.environ.get("HEADRACE_AGENTS", "0") in ("", "0"):
        config.hook.pytest_deselected(items=found)
        items[:] = [item for item in items if HERE not in item.path.parents]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with (
        Rollout(models.vocabulary(MODEL), STOPS[MODEL]) as rollout,
        in_front(rollout, models.folder(MODEL)) as gateway,
    ):
        yield Place(gateway, rollout, tmp_path)
