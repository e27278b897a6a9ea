"""These tests run where they are asked for (HEADRACE_VLLM=1): vLLM takes gigabytes of disk and minutes to install."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from tests.cached import locked
from tests.engine.kit import Client, Reference, serving
from tests.vllm.kit import reach
from tests.vllm.server import MAX_NUM_SEQS, NAME, vllm

from headrace.engine import tiny

#: vLLM's attention on a CPU wants heads of at least this width; those of `tiny` are narrower.
HEAD = 32


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that stops answers half-way has the machine to itself: beside another, the answer may end before it."""
    lock = item.config.rootpath / ".pytest_cache" / "vllm.lock"
    with locked(lock, shared=item.get_closest_marker("alone") is None):
        return (yield)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that both servers serve."""
    found = tmp_path_factory.mktemp("tiny")
    tiny.build(found, seed=0, head_dim=HEAD)
    return found


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    found = tmp_path_factory.mktemp("other")
    tiny.build(found, seed=1, head_dim=HEAD)
    return found


@pytest.fixture(scope="session")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="session")
def theirs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """vLLM."""
    with vllm(folder, tmp_path_factory.mktemp("vllm") / "vllm.log") as address, reach(address) as client:
        client.complete([1, 5, 9], max_tokens=1)  # the first answer takes long
        yield client


@pytest.fixture(scope="session")
def ours(folder: Path) -> Iterator[Client]:
    """Headrace's engine, started the same way."""
    with serving(
        model=str(folder),
        served_model_name=NAME,
        max_model_len=2048,
        max_num_seqs=MAX_NUM_SEQS,
        logprobs_mode="processed_logprobs",
    ) as client:
        yield client
