"""Real environments and a trainer run against the original, and the same runs against ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.atropos import runs
from tests.atropos.ours import ours


@pytest.fixture
def in_its_place(atropos: Path) -> Iterator[str]:
    """Our API's address, for atroposlib's own environments."""
    with ours() as (_, address):
        yield address


@pytest.mark.long
def test_an_environment_runs_to_the_last_step_of_the_original(original: str, folder: Path, tmp_path: Path) -> None:
    runs.one_environment(original, folder, tmp_path)


def test_two_environments_share_the_originals_batches(original: str, folder: Path, tmp_path: Path) -> None:
    runs.two_environments(original, folder, tmp_path, makes_ahead=True)


@pytest.mark.long
def test_an_environment_runs_to_the_last_step_of_ours(in_its_place: str, folder: Path, tmp_path: Path) -> None:
    runs.one_environment(in_its_place, folder, tmp_path)


def test_two_environments_share_our_batches(in_its_place: str, folder: Path, tmp_path: Path) -> None:
    runs.two_environments(in_its_place, folder, tmp_path)
