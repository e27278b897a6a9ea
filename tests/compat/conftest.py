"""What needs the real atroposlib runs where it is asked for (HEADRACE_ATROPOS=1), as in `tests.atropos`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.compat.model import model
from tests.gateway.kit import serving

HERE = Path(__file__).parent
#: The first test may wait for an installation.
TIMEOUT_S = 1800

collect_ignore = ["files", "inside"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "atropos: needs the real atroposlib (make test-atropos)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = [item for item in items if HERE in item.path.parents and "atropos" in getattr(item, "fixturenames", ())]
    for item in found:
        item.add_marker(pytest.mark.atropos)
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    if found and os.environ.get("HEADRACE_ATROPOS", "0") in ("", "0"):
        config.hook.pytest_deselected(items=found)
        items[:] = [item for item in items if item not in found]


@pytest.fixture(scope="session")
def atropos() -> Path:
    """The Python of an environment with the real atroposlib."""
    from tests.atropos import environment

    return environment.python()


@pytest.fixture
def models(folder: Path) -> Callable[[], AbstractContextManager[str]]:
    """Starts a scripted model that nobody has asked yet; its address."""
    return lambda: serving(model(folder))


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, and a process that knows no atroposlib, before and after."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    path, finders, before = list(sys.path), list(sys.meta_path), set(sys.modules)
    yield tmp_path
    sys.path[:], sys.meta_path[:] = path, finders
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "atroposlib" or name in {file.stem for file in (HERE / "files").glob("*.py")}:
            del sys.modules[name]
