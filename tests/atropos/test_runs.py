"""Real environments and a trainer run against the original: the same runs are to pass against ours."""

from __future__ import annotations

from pathlib import Path

from tests.atropos import runs


def test_an_environment_runs_to_the_last_step(original: str, folder: Path, tmp_path: Path) -> None:
    runs.one_environment(original, folder, tmp_path)


def test_two_environments_share_the_batches(original: str, folder: Path, tmp_path: Path) -> None:
    runs.two_environments(original, folder, tmp_path)
