"""`--pool-memory-mb`: how much of its payloads a pool keeps in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.pool.run import PoolServeCommand
from headrace.commands import Usage
from headrace.data.errors import InvalidInput
from headrace.pool.config import Limits
from headrace.pool.embedded import DataPool


def test_the_flag_goes_before_the_file(tmp_path: Path) -> None:
    config = tmp_path / "pool.yaml"
    config.write_text("limits: {memory_mb: 512, max_channels: 20}")
    assert PoolServeCommand(config=config).options()["limits"] == Limits(memory_mb=512, max_channels=20)
    flagged = PoolServeCommand(config=config, pool_memory_mb=64).options()["limits"]
    assert flagged == Limits(memory_mb=64, max_channels=20)
    assert "limits" not in PoolServeCommand().options()


def test_it_bounds_the_pool(tmp_path: Path) -> None:
    options = PoolServeCommand(journal=tmp_path / "pool", pool_memory_mb=0.5).options()
    with DataPool(tmp_path / "pool", **options) as pool:
        assert pool._state.memory.limit == 500_000


def test_without_a_journal_it_is_refused() -> None:
    with pytest.raises(InvalidInput, match="memory_mb is 64"):
        DataPool(None, **PoolServeCommand(pool_memory_mb=64).options())


def test_a_limit_that_is_unknown_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "pool.yaml"
    config.write_text("limits: {memory_gb: 1}")
    with pytest.raises(Usage, match=r"unknown limit 'memory_gb'; known: .*memory_mb"):
        PoolServeCommand(config=config).options()
