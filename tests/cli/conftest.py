from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.command import Command, Served, fill

from headrace import DataPool


@pytest.fixture
def headrace(capfd: pytest.CaptureFixture[str]) -> Command:
    """The command: `headrace("pool", "stats", target)`."""
    return Command(capfd)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A journal with something in it that no pool has open."""
    folder = tmp_path / "journal"
    with DataPool(folder, durability="os") as pool:
        fill(pool)
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The same, in a `headrace pool serve`; for tests that only read."""
    folder = tmp_path_factory.mktemp("served") / "journal"
    with DataPool(folder, durability="os") as pool:
        fill(pool)
    with Served("--journal", folder) as server:
        yield server


@pytest.fixture(params=["folder", "http"])
def target(request: pytest.FixtureRequest) -> str:
    """A TARGET of each kind that needs no cluster, with the same content."""
    if request.param == "folder":
        return str(request.getfixturevalue("journal"))
    server: Served = request.getfixturevalue("served")
    return server.address
