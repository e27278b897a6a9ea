"""`headrace bench` hands over to `headrace.bench`, and its exit code is the benchmark's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Command

from headrace import bench


@pytest.mark.parametrize("code", [0, 1])
def test_flags_reach_the_benchmark_and_its_code_comes_back(
    headrace: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    asked: list[Any] = []

    def benchmark(name: str, **flags: Any) -> int:
        asked.append((name, flags))
        return code

    monkeypatch.setattr(bench, "benchmark", benchmark)
    assert headrace("bench", "pool", "--quick", "--json", tmp_path / "bench.json").code == code
    assert headrace("bench", "trainer", "--runs", "3", "--busy", "2").code == code
    assert asked == [
        ("pool", {"quick": True, "json_path": tmp_path / "bench.json", "runs": None, "busy": 0}),
        ("trainer", {"quick": False, "json_path": None, "runs": 3, "busy": 2}),
    ]
