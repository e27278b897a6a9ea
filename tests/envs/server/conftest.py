from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.kit import Client
from tests.engine.kit import serving as serving_engine
from tests.gateway.kit import Evidence

from headrace.envs.server import APIServerConfig, ServerManager


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small models are slower with threads, and the machine has other tests to run."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[Client]:
    """An engine that every test may use and none may change; it records what it consumed and sampled."""
    with serving_engine(
        model=str(folder), served_model_name="tiny", logprobs_mode="processed_logprobs", record=100_000
    ) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture
def evidence(engine: Client) -> Evidence:
    return Evidence(engine)


@pytest.fixture
async def server(engine: Client, tokenizer: Any) -> AsyncIterator[ServerManager]:
    """What an environment has as `self.server`, on one engine."""
    config = APIServerConfig(base_url=f"http://{engine.host}/v1", model_name="tiny", server_type="vllm")
    manager = ServerManager([config], tokenizer=tokenizer, max_n_completions=2)
    yield manager
    await manager.close()
