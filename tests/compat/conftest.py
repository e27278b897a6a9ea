"""What needs the real atroposlib runs where it is asked for (HEADRACE_ATROPOS=1), as in `tests.atropos`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.compat.model import model
from tests.gateway.kit import serving
from tests.venvs import ATROPOS

HERE = Path(__file__).parent

collect_ignore = ["files", "inside"]


@pytest.fixture(scope="session")
def atropos() -> Path:
    """The Python of an environment with the real atroposlib."""
    return ATROPOS.python()


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
