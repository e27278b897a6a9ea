"""The environments that ship are good citizens at the original: they register, send groups that it takes, and leave."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.kit import Client
from tests.envs.shipped.kit import PARAMS, are_whole, shipped

from headrace.envs import BaseEnv


@pytest.fixture
def engine(engine: Client) -> str:
    """The base_url of a real engine."""
    return f"http://{engine.host}/v1"


@pytest.mark.parametrize("env_cls", PARAMS)
def test_it_serves_a_trainer_at_the_original(
    env_cls: type[BaseEnv], original: str, engine: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with shipped(env_cls, engine, folder) as run:
        groups = run.served(original)
    are_whole(groups)
    assert {group["env_id"] for group in groups} == {0}
