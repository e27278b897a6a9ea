from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cached import made_once
from tests.engine.kit import Client, rollout_engine
from tests.gateway import tool_model
from tests.gateway.kit import Evidence, Running, running_gateway
from tests.gateway.rollout import Rollout, in_front, scripted

from headrace import DataPool


@pytest.fixture
def gateway(pool: DataPool, engine: Client, folder: Path) -> Iterator[Running]:
    """A gateway on an empty pool, in front of `engine`."""
    with running_gateway(pool, f"http://{engine.host}", folder) as found:
        yield found


@pytest.fixture
def evidence(engine: Client, gateway: Running) -> Evidence:
    """What `engine` does during this test, once `gateway` has probed it."""
    return Evidence(engine)


@pytest.fixture
def base(gateway: Running) -> str:
    """The base_url of a new trajectory."""
    return str(gateway.init()["base_url"])


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Rollout]:
    """A scripted server for all tests of a file; each has it as `rollout`."""
    with scripted(folder) as found:
        yield found


@pytest.fixture
def rollout(shared: Rollout) -> Rollout:
    """A scripted server that knows nothing of the test before."""
    shared.forget()
    return shared


@pytest.fixture(scope="module")
def common(shared: Rollout, folder: Path) -> Iterator[Running]:
    """A gateway in front of the scripted server, for all tests of a file."""
    with in_front(shared, folder) as found:
        yield found


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that a test holds up."""
    found = ThreadPoolExecutor(8)
    yield found
    found.shutdown(wait=False, cancel_futures=True)  # a call that a failed test left held must not hold up the others


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a model that calls tools."""
    return made_once(tmp_path_factory, "taught", tool_model.train)


@pytest.fixture(scope="session")
def calculator(taught: Path) -> Iterator[Client]:
    """An engine with the model that calls tools; none may change it."""
    with rollout_engine(taught, "taught", record=100_000) as client:
        yield client


@pytest.fixture
def agency(pool: DataPool, calculator: Client, taught: Path) -> Iterator[Running]:
    """A gateway on an empty pool, in front of `calculator`, for agents with tools. In the channel `every` each token
    of a stream is written by itself."""
    with running_gateway(pool, f"http://{calculator.host}", taught, stream_flush_ms="50,every:0") as found:
        yield found


@pytest.fixture
def witness(calculator: Client, agency: Running) -> Evidence:
    """What `calculator` does during this test, once `agency` has probed it."""
    return Evidence(calculator)
