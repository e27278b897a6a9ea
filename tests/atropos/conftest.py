"""What needs the original runs where it is asked for (HEADRACE_ATROPOS=1): it takes a minute to install, and disk.

The rest compares with the original's recorded answers, and runs always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.atropos.server import original as start
from tests.venvs import ATROPOS

collect_ignore = ["inside"]


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
    return ATROPOS.python()
