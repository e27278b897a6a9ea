from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gateway.images.kit import FAMILY, Seeing, seeing, write_tokenizer
from tests.gateway.kit import Running
from tests.gateway.rollout import in_front


@pytest.fixture(scope="session")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that takes images."""
    found = tmp_path_factory.mktemp("sighted")
    write_tokenizer(found)
    return found


@pytest.fixture
def rollout(sighted: Path) -> Iterator[Seeing]:
    with seeing(sighted) as found:
        yield found


@pytest.fixture
def gateway(rollout: Seeing, sighted: Path) -> Iterator[Running]:
    with in_front(rollout, sighted, renderer=FAMILY) as found:
        yield found


@pytest.fixture(scope="module")
def served(sighted: Path) -> Iterator[tuple[Running, Seeing]]:
    with seeing(sighted) as rollout, in_front(rollout, sighted, renderer=FAMILY) as gateway:
        yield gateway, rollout


@pytest.fixture
def shared(served: tuple[Running, Seeing]) -> tuple[Running, Seeing]:
    """A gateway and its server for tests that change neither."""
    served[1].forget()
    return served
