"""These tests run where they are asked for (HEADRACE_AGENTS=1): the agents take 0.7 GB of disk, and npm to install."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.agents.kit import Place
from tests.gateway.rollout import Rollout, in_front
from tests.tokens import models
from tests.tokens.kit import STOPS

#: A model that reasons and calls tools, and whose tokens are large enough for an agent's long instructions.
MODEL = "qwen3"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with (
        Rollout(models.vocabulary(MODEL), STOPS[MODEL]) as rollout,
        in_front(rollout, models.folder(MODEL)) as gateway,
    ):
        yield Place(gateway, rollout, tmp_path)
