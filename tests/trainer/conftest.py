"""A model small enough to be trained many times a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.cached import made_once

from headrace.engine import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return made_once(tmp_path_factory, "model", lambda folder: tiny.build(folder, 0, **sizes, **heads))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order, so that what must be equal is."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
