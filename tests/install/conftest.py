"""What installs wheels into clean environments runs where it is asked for (HEADRACE_INSTALL=1): it takes minutes.

The rest, about how a set-up decides and what it says, runs always.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cached import made_once
from tests.install.kit import Clean, build, fetch_uv


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a wheel and an sdist of this tree."""
    return made_once(tmp_path_factory, "built", build)


@pytest.fixture(scope="session")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of that name."""
    return made_once(tmp_path_factory, "uv", fetch_uv) / "bin" / "uv"


@pytest.fixture(scope="module")
def core(built: Path, uv: Path, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """An environment with the wheel and no extra."""
    (wheel,) = built.glob("*.whl")
    clean = Clean.made(tmp_path_factory.mktemp("core"))
    clean.install(uv, str(wheel))
    return clean
