from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.engine.kit import Client, serving
from tests.gateway.kit import Running, running_gateway
from tests.trainer.sync.kit import Trained, address

from headrace import DataPool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small models are slower with threads, and the machine has other tests to run."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def first(folder: Path) -> Trained:
    """What every engine begins with."""
    return Trained(folder)


@pytest.fixture(scope="session")
def trained(other: Path) -> Trained:
    return Trained(other)


@pytest.fixture
def engine(folder: Path) -> Iterator[Client]:
    with serving(model=str(folder), served_model_name="tiny", logprobs_mode="processed_logprobs") as found:
        yield found


@pytest.fixture
def second(folder: Path) -> Iterator[Client]:
    with serving(model=str(folder), served_model_name="tiny", logprobs_mode="processed_logprobs") as found:
        yield found


@pytest.fixture
def pool() -> Iterator[DataPool]:
    with DataPool() as found:
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
