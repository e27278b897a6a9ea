"""What needs the original runs where it is asked for (HEADRACE_ATROPOS=1): it takes a minute to install, and disk.

The rest compares with the original's recorded answers, and runs always.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.atropos.environment import python
from tests.atropos.server import original as start

HERE = Path(__file__).parent
#: The first test may wait for an installation.
TIMEOUT_S = 1800

#: Fixtures that need it.
NEED = {"fresh", "atropos"}

collect_ignore = ["inside"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "atropos: needs the real atroposlib (make test-atropos)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = [item for item in items if HERE in item.path.parents and NEED & {*getattr(item, "fixturenames", ())}]
    for item in found:
        item.add_marker(pytest.mark.atropos)
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    if found and os.environ.get("HEADRACE_ATROPOS", "0") in ("", "0"):
        config.hook.pytest_deselected(items=found)
        items[:] = [item for item in items if item not in found]


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], AbstractContextManager[str]]:
    """Starts an original that nobody has spoken to yet; its address."""
    return lambda: start(tmp_path / "atropos.log")


@pytest.fixture
def original(fresh: Callable[[], AbstractContextManager[str]]) -> Iterator[str]:
    with fresh() as address:
        yield address


@pytest.fixture
def atropos() -> Path:
    """The Python that has the real atroposlib."""
    return python()
