from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.kit import Client
from tests.gateway.kit import Evidence

from headrace.envs.server import APIServerConfig, ServerManager


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
