"""What reads recorded ids back, with the model that the tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.rewards.recorded import SampleReader
from headrace.tokens import Renderer, load_renderer


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return load_renderer(folder)


@pytest.fixture(scope="module")
def reader(renderer: Renderer) -> SampleReader:
    return SampleReader(renderer)
