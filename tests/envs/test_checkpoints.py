"""An environment's state is saved with the trainer's checkpoints and comes back as attributes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.envs.api import Api
from tests.envs.kit import CountingEnv, config, running

from headrace.data.errors import InvalidInput


class Saving(CountingEnv):
    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {"learned": {"at": step}, "next": 1000})


@pytest.fixture
async def saved(tmp_path: Path) -> AsyncIterator[Api]:
    found = Api(checkpoint_dir=str(tmp_path), checkpoint_interval=5)
    await found.start()
    yield found
    await found.stop()


async def reached(api: Api, env: CountingEnv, step: int) -> None:
    await api.until(lambda: bool(env.status_dict))
    api.step = step
    await api.until(lambda: env.curr_step == step)


async def test_the_newest_up_to_the_step_comes_back_when_a_run_goes_on(saved: Api) -> None:
    env = Saving(config(saved))
    async with running(env):
        await reached(saved, env, 4)
        await reached(saved, env, 12)
        await reached(saved, env, 13)
        await reached(saved, env, 25)
    saved.environments.clear()
    saved.queue.clear()
    saved.step = 24
    again = Saving(config(saved))
    async with running(again):
        await saved.until(lambda: again.next > 1000)
    assert again.learned == {"at": 10}  # type: ignore[attr-defined]


async def test_they_lie_under_the_environments_name_as_json(saved: Api, tmp_path: Path) -> None:
    env = Saving(config(saved))
    async with running(env):
        await reached(saved, env, 7)
    (found,) = (tmp_path / "env_checkpoints" / "counting_0").iterdir()
    assert found.name == "step-5.json"
    assert json.loads(found.read_bytes()) == {"learned": {"at": 5}, "next": 1000}


async def test_one_that_cannot_be_written_costs_no_group(saved: Api, tmp_path: Path) -> None:
    (tmp_path / "env_checkpoints").write_text("in the way")
    env = Saving(config(saved))
    async with running(env):
        await reached(saved, env, 5)
        await saved.until(lambda: env.counts.failed["save_checkpoint"] == 1)
        before = len(saved.received)
        saved.queue.clear()
        await saved.until(lambda: len(saved.received) > before)


async def test_a_damaged_one_is_named_before_any_work(saved: Api, tmp_path: Path) -> None:
    place = tmp_path / "env_checkpoints" / "counting_0"
    place.mkdir(parents=True)
    (place / "step-5.json").write_text('{"next": ')
    saved.step = 5
    with pytest.raises(InvalidInput, match=r"step-5\.json is no checkpoint"):
        await Saving(config(saved)).env_manager()
    assert saved.received == []
