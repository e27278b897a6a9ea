"""Each family's tests run one after the other, so that one tokenizer at a time is in memory."""

from __future__ import annotations

import pytest
from tests.models import corpus

from headrace.checkup.model import ModelReport, check_renderer
from headrace.tokens import Renderer


@pytest.fixture(
    scope="session", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in corpus.FAMILIES]
)
def name(request: pytest.FixtureRequest) -> str:
    """A family's name."""
    return str(request.param)


@pytest.fixture(scope="session")
def renderer(name: str) -> Renderer:
    """The renderer that a family gets."""
    return corpus.renderer(name)


@pytest.fixture(scope="session")
def report(name: str, renderer: Renderer) -> ModelReport:
    """What `headrace check-model` finds about a family."""
    return check_renderer(renderer, name)
