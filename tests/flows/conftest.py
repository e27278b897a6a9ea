from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.engine.kit import Client
from tests.gateway.kit import Running, running_gateway

from headrace import DataPool
from headrace.flows import AgentConfig, AgentFlowBase, GatewayClient, Task

Made = Callable[..., AgentFlowBase]


@pytest.fixture(scope="module")
def gateway(engine: Client, folder: Path) -> Iterator[Running]:
    """A gateway in front of `engine`, for all tests of a file; each has a trajectory of its own."""
    with DataPool() as pool, running_gateway(pool, f"http://{engine.host}", folder, response_length=32) as found:
        yield found


@pytest_asyncio.fixture
async def client(gateway: Running) -> AsyncIterator[GatewayClient]:
    """The gateway as flows reach it."""
    found = GatewayClient(gateway.address)
    yield found
    await found.aclose()


@pytest_asyncio.fixture
async def made(client: GatewayClient, tmp_path: Path) -> AsyncIterator[Made]:
    """Makes the flow of a configuration, whose files are in `tmp_path`, and closes it."""
    flows: list[AgentFlowBase] = []

    def make(**config: Any) -> AgentFlowBase:
        flows.append(AgentConfig(**config).made(client, tmp_path))
        return flows[-1]

    yield make
    for flow in flows:
        await flow.aclose()


@pytest.fixture
def task(request: pytest.FixtureRequest) -> Task:
    """A rollout of a row, whose names are this test's."""
    row = {"question": "Guess a number.", "ground_truth": "7", "data_source": "numbers"}
    return Task(row=row, prompt_uid=request.node.name, rollout=0, n_rollouts=2)
