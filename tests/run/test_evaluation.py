"""Held-out data is played to its end, whatever single rollouts come to, and once for each step that it stands for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.flows.flow import AgentFailed
from headrace.flows.gateway_client import GatewayRefused
from headrace.flows.task import Task
from headrace.net.http_answer import NoAnswer
from headrace.processes import Processes
from headrace.run.config import RunConfig
from headrace.run.evaluate import Evaluations, evaluate_run
from headrace.run.evaluation import play_all
from headrace.run.services import RunPlan


class Player:
    """Ends the rollout of each row with what the test says, after all have begun."""

    def __init__(self, *ends: Exception | None) -> None:
        self.ends = ends
        self.tasks = [Task(row={}, prompt_uid=f"row-{at}", rollout=0, n_rollouts=1) for at in range(len(ends))]
        self.ended: list[str] = []
        self._begun = 0
        self._all_begun = asyncio.Event()

    async def run(self, task: Task) -> None:
        self._begun += 1
        if self._begun == len(self.ends):
            self._all_begun.set()
        await self._all_begun.wait()
        for _ in range(self._begun):  # whoever would cancel it has its turn
            await asyncio.sleep(0)
        if (error := self.ends[self.tasks.index(task)]) is not None:
            raise error
        self.ended.append(task.prompt_uid)

    def play(self) -> dict[str, str]:
        return asyncio.run(play_all(self.tasks, self, len(self.tasks)))


def test_a_rollout_that_the_gateway_fails_is_counted_and_ends_no_other() -> None:
    player = Player(
        GatewayRefused("answered 502", 502),
        None,
        NoAnswer("cannot be reached"),
        AgentFailed("crashed"),
        GatewayRefused("answered 503", 503),
        None,
    )
    uids = [task.trajectory_uid for task in player.tasks]
    assert player.play() == {
        uids[0]: "answered 502",
        uids[2]: "cannot be reached",
        uids[3]: "crashed",
        uids[4]: "answered 503",
    }
    assert set(player.ended) == {"row-1", "row-5"}


def test_a_gateway_that_fails_all_of_them_is_one_error() -> None:
    with pytest.raises(HeadraceError, match=r"^none of 2 rollouts could be played: cannot be reached$"):
        Player(NoAnswer("cannot be reached"), NoAnswer("cannot be reached")).play()


def test_an_agent_that_fails_each_time_is_no_error() -> None:
    assert len(Player(AgentFailed("hung"), AgentFailed("crashed")).play()) == 2


@pytest.mark.parametrize("status", [401, 403])
def test_so_are_keys_that_the_gateway_refuses(status: int) -> None:
    with pytest.raises(GatewayRefused, match="no such key"):
        Player(None, GatewayRefused("no such key", status), None).play()


@pytest.mark.parametrize(("every", "expected"), [(2, [2, 4]), (4, [4]), (1, [1, 2, 3, 4, 5])])
def test_the_last_step_is_left_to_the_end_of_the_run(
    changed: Callable[..., tuple[RunConfig, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int,
    expected: list[int],
) -> None:
    """Then it is played with what was learned; begun here too, it would be played twice."""
    begun: list[int] = []

    def begin(self: Evaluations, step: int, **options: Any) -> None:
        self._step = step
        begun.append(step)

    monkeypatch.setattr(Evaluations, "begin", begin)
    config, base = changed(train={"steps": 6}, evaluate={"every": every})
    planned = RunPlan((), {}, "http://127.0.0.1:1", "http://127.0.0.1:1", ())
    with Processes(tmp_path) as processes:
        evaluations = Evaluations(config, base, tmp_path, planned, processes)
        for rows in range(7):
            evaluations.follow(rows)
    assert begun == expected


def test_a_checkpoint_that_is_an_adapter_is_refused_with_what_to_do(
    changed: Callable[..., tuple[RunConfig, Path]], tmp_path: Path
) -> None:
    config, base = changed()
    adapter = tmp_path / "RUN" / "trainer" / "checkpoints" / "00000003"
    adapter.mkdir(parents=True)
    (adapter / "adapter_model.safetensors").touch()
    with pytest.raises(InvalidInput, match=r"00000003 is a LoRA adapter, .* --evaluate --set model=FOLDER --run-dir"):
        evaluate_run(base / "run.yaml", config, tmp_path / "RUN")
