from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.kit import Client, Reference, serving


@pytest.fixture(scope="session")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="session")
def other_reference(other: Path) -> Reference:
    return Reference(other)


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[Client]:
    """An engine that every test may use and none may change."""
    with serving(model=str(folder), served_model_name="tiny") as client:
        yield client


@pytest.fixture
def own(folder: Path) -> Iterator[Client]:
    """An engine for one test, to pause and to change."""
    with serving(model=str(folder), served_model_name="tiny") as client:
        yield client
