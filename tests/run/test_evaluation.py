"""Held-out data is played to its end, whatever single rollouts come to, and once for each step that it stands for."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from tests.pool.kit import step, trajectory

from headrace import DataPool
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.flows.flow import AgentFailed
from headrace.flows.gateway_client import GatewayRefused
from headrace.flows.task import Task
from headrace.net.http_answer import NoAnswer
from headrace.processes import Processes
from headrace.run import evaluation
from headrace.run.config import RunConfig
from headrace.run.dry_run import told_rollout
from headrace.run.evaluate import Evaluations, evaluate_run
from headrace.run.evaluation import _rollout, play_all, without_reward
from headrace.run.results import EvaluatedRollout, summary, write
from headrace.run.run import TrainingRun
from headrace.run.services import RunPlan
from headrace.run.stack import StartLog

#: Sections of a run's file whose agent is an environment.
ENVIRONMENT: dict[str, Any] = {"agent": {"env": "my_env.py"}, "data": None, "reward": None}


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


# -- told to end -------------------------------------------------------------------------------------------------------


class Waiting(Player):
    """Rollouts that wait for ever. Once all have begun, this process is told to end."""

    async def run(self, task: Task) -> None:
        self._begun += 1
        if self._begun == len(self.ends):
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # to end an agent takes a while
            self.ended.append(task.prompt_uid)


@pytest.fixture
def told_to_end() -> Iterator[None]:
    """A SIGTERM that nobody handles fails the test, in place of ending whoever runs it."""

    def unhandled(*_: object) -> None:
        raise AssertionError("nobody handled SIGTERM")

    before = signal.signal(signal.SIGTERM, unhandled)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("told_to_end")
def test_sigterm_ends_what_plays_and_a_second_one_ends_the_process() -> None:
    player = Waiting(None, None, None)
    with pytest.raises(asyncio.CancelledError):
        player.play()
    assert sorted(player.ended) == ["row-0", "row-1", "row-2"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_an_evaluation_that_was_told_to_end_ends_with_143_and_leaves_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def told_to_end(config: evaluation.EvaluationConfig) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(evaluation, "evaluate", told_to_end)
    config = {
        **dict.fromkeys(("base", "gateway", "pool", "model", "name"), "x"),
        "into": str(tmp_path / "step-0.json"),
        "data": {"val": "val.jsonl"},
        "agent": {"run": "agent.py:solve"},
    }
    file = tmp_path / "evaluation.yaml"
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as ended:
        evaluation.main([str(file)])
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == [file]


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_what_is_gone_from_the_pool_will_have_no_reward(pool: DataPool) -> None:
    pool.submit_steps([step("crashed"), *trajectory("unscorable"), *trajectory("waiting")], "val")
    pool.fail("crashed", "exit_code", "val")
    pool.fail("unscorable", "reward: no verdict", "val", quarantine=True)
    uids = {"crashed", "unscorable", "waiting", "unknown"}
    gone = {
        "crashed": "trajectory 'crashed' failed (exit_code): its content is gone",
        "unscorable": "trajectory 'unscorable' failed (reward: no verdict): its content is gone",
        "unknown": "no trajectory 'unknown'",
    }
    assert without_reward(pool, uids, quiet=False) == gone
    assert without_reward(pool, uids, quiet=True) == {**gone, "waiting": "no reward (queued)"}


def test_a_complete_rollout_that_nobody_scored_says_so_and_so_does_a_dry_run(
    pool: DataPool, changed: Callable[..., tuple[RunConfig, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.submit_steps(trajectory("t"), "val")
    task = Task(row={}, prompt_uid="t", rollout=0, n_rollouts=1)
    unscored = _rollout(0, 0, task, pool.trajectory("t"), {}, (), lambda ids: "red")
    assert (unscored.reward, unscored.calls, unscored.text) == (None, 1, "red")
    result = summary("e", 0, [unscored], rollouts=1, pass_reward=1.0, seconds=1.0)
    monkeypatch.setattr("headrace.run.dry_run.played", lambda *args, **options: result)
    config, base = changed(reward=None)
    assert config.data is not None
    said = r"the rollout counts as failed: it is complete, and nobody gave it a reward; name one in the run's file"
    with pytest.raises(HeadraceError, match=said):
        told_rollout(config, config.data, base, StartLog(Console(file=io.StringIO())))


# -- which steps -------------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps whose evaluations are begun; none is played."""
    found: list[int] = []

    def begin(self: Evaluations, step: int, **options: Any) -> None:
        self._step = step
        found.append(step)

    monkeypatch.setattr(Evaluations, "begin", begin)
    return found


@pytest.fixture
def evaluations(changed: Callable[..., tuple[RunConfig, Path]], tmp_path: Path) -> Iterator[Callable[..., Evaluations]]:
    """Makes the evaluations of the run in `tmp_path`, by the sections of its file."""
    planned = RunPlan((), {}, "http://127.0.0.1:1", "http://127.0.0.1:1", ())
    with Processes(tmp_path) as processes:

        def make(**sections: Any) -> Evaluations:
            return Evaluations(*changed(**sections), tmp_path, planned, processes)

        yield make


def leave(run: Path, learned: int, *evaluations: str) -> None:
    """Leaves in a run's folder what one that was ended has: a checkpoint of so many steps, and these evaluations."""
    (run / "trainer" / "checkpoints" / f"{learned:08}").mkdir(parents=True)
    (run / "evaluations").mkdir()
    for name in evaluations:
        (run / "evaluations" / name).touch()


@pytest.mark.parametrize(("every", "expected"), [(2, [2, 4]), (4, [4]), (1, [1, 2, 3, 4, 5])])
def test_the_last_step_is_left_to_the_end_of_the_run(
    evaluations: Callable[..., Evaluations], begun: list[int], every: int, expected: list[int]
) -> None:
    """Then it is played with what was learned; begun here too, it would be played twice."""
    found = evaluations(train={"steps": 6}, evaluate={"every": every})
    for rows in range(7):
        found.follow(rows)
    assert begun == expected


@pytest.mark.parametrize(
    ("learned", "there", "expected"),
    [
        pytest.param(17, ["step-0.json", "step-5.json", "step-15.json"], [20, 25], id="none is due"),
        pytest.param(17, ["step-0.json", "step-10.json"], [17, 20, 25], id="one was broken off"),
        pytest.param(9, ["step-0.json", "step-5.json", "step-21.json"], [10, 15, 20, 25], id="one was of lost weights"),
        pytest.param(7, ["step-0.json", "step-5.json.part", "step-5"], [7, 10, 15, 20, 25], id="one was half-written"),
    ],
)
def test_a_resumed_run_plays_what_is_due_and_nothing_again(
    evaluations: Callable[..., Evaluations],
    begun: list[int],
    tmp_path: Path,
    learned: int,
    there: list[str],
    expected: list[int],
) -> None:
    leave(tmp_path, learned, *there)
    found = evaluations(train={"steps": 30}, evaluate={"every": 5})
    for rows in range(learned, 30):
        found.follow(rows)
    assert begun == expected


@pytest.mark.parametrize(
    ("learned", "there", "due"),
    [(0, [], True), (0, ["step-0.json"], False), (3, [], False), (3, ["step-0.json"], False)],
)
def test_what_has_learned_is_not_played_as_what_has_not(
    evaluations: Callable[..., Evaluations], tmp_path: Path, learned: int, there: list[str], due: bool
) -> None:
    """An environment's run that was not evaluated before may be resumed with `evaluate.every`."""
    leave(tmp_path, learned, *there)
    assert evaluations(**ENVIRONMENT, evaluate={"every": 10}).due_first == due


def test_a_run_that_was_not_evaluated_before_it_learned_tells_no_score_of_then(
    changed: Callable[..., tuple[RunConfig, Path]], tmp_path: Path
) -> None:
    run = TrainingRun(*changed(**ENVIRONMENT, evaluate={"every": 10}), tmp_path, Console(file=io.StringIO()))
    for at, score in ((10, 0.5), (20, 0.75)):
        played = [EvaluatedRollout(0, 0, "", score)]
        result = summary("e", at, played, rollouts=1, pass_reward=1.0, seconds=1.0)
        write(result, tmp_path / "evaluations" / f"step-{at}.json")
    told = run.verdict(1.0)
    assert (told["held_out_start"], told["held_out_end"]) == (None, 0.75)


def test_a_checkpoint_that_is_an_adapter_is_refused_with_what_to_do(
    changed: Callable[..., tuple[RunConfig, Path]], tmp_path: Path
) -> None:
    config, base = changed()
    adapter = tmp_path / "RUN" / "trainer" / "checkpoints" / "00000003"
    adapter.mkdir(parents=True)
    (adapter / "adapter_model.safetensors").touch()
    with pytest.raises(InvalidInput, match=r"00000003 is a LoRA adapter, .* --evaluate --set model=FOLDER --run-dir"):
        evaluate_run(base / "run.yaml", config, tmp_path / "RUN")
