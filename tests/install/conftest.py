"""What installs wheels into clean environments runs where it is asked for (HEADRACE_INSTALL=1): it takes minutes.

The rest, about how a set-up decides and what it says, runs always.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.install.kit import Clean, build, fetch_uv

HERE = Path(__file__).parent
#: An installation fetches what no cache has.
TIMEOUT_S = 1800

#: Fixtures that install something.
NEED = {"built", "uv"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "install: installs a built wheel into clean environments (make test-install)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = [item for item in items if HERE in item.path.parents and NEED & {*getattr(item, "fixturenames", ())}]
    for item in found:
        item.add_marker(pytest.mark.install)
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    if found and os.environ.get("HEADRACE_INSTALL", "0") in ("", "0"):
        config.hook.pytest_deselected(items=found)
        items[:] = [item for item in items if item not in found]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a wheel and an sdist of this tree."""
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of that name."""
    return fetch_uv(tmp_path_factory.mktemp("uv"))


@pytest.fixture(scope="module")
def core(built: Path, uv: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """An environment with the wheel and no extra."""
    (wheel,) = built.glob("*.whl")
    clean = Clean.made(tmp_path_factory.mktemp("core"))
    clean.install(uv, str(wheel))
    return clean
