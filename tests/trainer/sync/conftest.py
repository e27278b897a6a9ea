from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.kit import Client, rollout_engine
from tests.gateway.kit import Running, running_gateway
from tests.trainer.sync.kit import Trained, address

from headrace import DataPool


@pytest.fixture(scope="session")
def first(folder: Path) -> Trained:
    """What every engine begins with."""
    return Trained(folder)


@pytest.fixture(scope="session")
def trained(other: Path) -> Trained:
    return Trained(other)


@pytest.fixture
def engine(own: Client) -> Client:
    """The test's own: a publish changes its weights."""
    return own


@pytest.fixture
def second(folder: Path) -> Iterator[Client]:
    with rollout_engine(folder) as found:
        yield found


@pytest.fixture
def gateway(pool: DataPool, engine: Client, folder: Path) -> Iterator[Running]:
    with running_gateway(pool, address(engine), folder) as found:
        yield found


@pytest.fixture
def two(pool: DataPool, engine: Client, second: Client, folder: Path) -> Iterator[Running]:
    """A gateway in front of two engines."""
    with running_gateway(pool, [address(engine), address(second)], folder) as found:
        yield found
