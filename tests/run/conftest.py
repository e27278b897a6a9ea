"""Projects as `headrace new` writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.run.config import RunConfig, load
from headrace.run.new import Kind, create


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One project with an agent; read by many tests and changed by none."""
    folder = tmp_path_factory.mktemp("projects") / "agent"
    create(folder, "agent")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Callable[[Kind], Path]:
    def make(kind: Kind) -> Path:
        create(tmp_path / kind, kind)
        return tmp_path / kind

    return make


@pytest.fixture
def changed(written: Path, tmp_path: Path) -> Callable[..., tuple[RunConfig, Path]]:
    """The project's file with other sections, read, and its folder, in which the project's files are linked."""
    for path in written.iterdir():
        (tmp_path / path.name).symlink_to(path)

    def make(**sections: Any) -> tuple[RunConfig, Path]:
        values = {**yaml.safe_load((written / "run.yaml").read_text()), **sections}
        file = tmp_path / "changed.yaml"
        file.write_text(yaml.safe_dump({name: value for name, value in values.items() if value is not None}))
        return load(file), tmp_path

    return make
