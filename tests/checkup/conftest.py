from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.cli.command import Command
from tests.engine.kit import Client
from tests.engine.kit import serving as serving_engine


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small models are slower with threads, and the machine has other tests to run."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Client]:
    with serving_engine(model=str(folder), served_model_name="tiny", logprobs_mode="processed_logprobs") as client:
        yield client


@pytest.fixture
def headrace(capfd: pytest.CaptureFixture[str]) -> Command:
    """The command: `headrace("check-gateway", address)`."""
    return Command(capfd)
