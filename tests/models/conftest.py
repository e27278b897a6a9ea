"""Each family's tests run one after the other, so that one tokenizer at a time is in memory."""

from __future__ import annotations

from collections.abc import Container, Iterable

import pytest
from tests.models import corpus

from headrace.checkup.model import ModelReport, check_renderer
from headrace.tokens import Renderer

#: One family of each kind of template; the others are of the long tier.
SAMPLE = ("qwen3", "qwen3-coder", "deepseek-v3.1", "gpt-oss", "mistral-small-3.2", "glm-4.6", "kimi-k2", "gemma4")


def families(names: Iterable[str], always: Container[str] = SAMPLE) -> list[object]:
    """Parameters of one family each, which xdist keeps together."""
    return [
        pytest.param(name, marks=[pytest.mark.xdist_group(name), *([] if name in always else [pytest.mark.long])])
        for name in names
    ]


@pytest.fixture(scope="session", params=families(corpus.FAMILIES))
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
