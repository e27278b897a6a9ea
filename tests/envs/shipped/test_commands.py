"""Each environment that ships serves a trainer, processes and evaluates, on the real engine and the real API."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.envs.shipped.kit import PARAMS, SHIPPED, Run, are_whole, shipped

pytestmark = pytest.mark.system


@pytest.fixture(params=PARAMS)
def run(request: pytest.FixtureRequest, engine: str, folder: Path, here: Path) -> Iterator[Run]:
    with shipped(request.param, engine, folder) as found:
        yield found


def test_it_serves_a_trainer(run: Run, trajectory_api: str) -> None:
    are_whole(run.served(trajectory_api))


def test_it_processes(run: Run) -> None:
    groups = run.processed()
    assert len(groups) == 2
    are_whole(groups)


def test_it_evaluates(run: Run) -> None:
    assert 0.0 <= run.evaluated(3) <= 1.0


@pytest.mark.parametrize("name", [env_cls.name for env_cls in SHIPPED])
def test_it_is_a_module_to_run(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"headrace.envs.{name}", "serve", "--env.eval_item", "3"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"python -m headrace.envs.{name} serve: unknown flag --env.eval_item; did you mean")
