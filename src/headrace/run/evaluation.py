"""Plays every row of the held-out data through a gateway that runs, and tells what it came to.

    python -m headrace.run.evaluation FILE.yaml

is a process of its own, so that what an agent does there is not done to the run. Each rollout is a group by itself on
the `val` channel: one that fails holds up no other. Rewards come from the same reward loop as in training; a rollout
that failed, or whose reward did, is counted as failed and never as zero. SIGTERM ends its agents first, and then it,
with `TERMINATED`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import Field

from headrace.data.errors import HeadraceError
from headrace.data.keys import configured_key
from headrace.data.trajectory import Trajectory
from headrace.files import checked, model_folder, read
from headrace.flows.config import AgentConfig, DataConfig
from headrace.flows.flow import AgentFailed
from headrace.flows.gateway_client import WRONG_KEY, GatewayRefused
from headrace.flows.rollout_config import GatewaySource
from headrace.flows.rollouter import RolloutPlayer
from headrace.flows.task import Task
from headrace.net.http_answer import NoAnswer
from headrace.pool import KEY_VARIABLE
from headrace.pool.calls import BlockingPool
from headrace.pool.connect import connect
from headrace.pool.errors import NotFound
from headrace.run.config import VAL, EvaluationSampling
from headrace.run.results import EvaluatedRollout, EvaluationResult, summary, write
from headrace.trainer.config import Section

#: Seconds between two questions whether a trajectory without a reward has failed.
ASK_S = 2.0
#: Seconds without any news after which rewards that are still missing are counted as failed: a judge with its retries
#: takes minutes.
QUIET_S = 600.0
#: Why a rollout that is complete has no reward. Where the run's file names one, none is handed out without.
NOBODY_SCORED = (
    "it is complete, and nobody gave it a reward; name one in the run's file, as in reward: {rules: [exact_match]}, or "
    "have the agent tell its own (POST {base_url}/v1/reward)"
)
#: The exit code of an evaluation that SIGTERM ended, as shells have it: 128 and the signal's number.
TERMINATED = 128 + signal.SIGTERM


class EvaluationConfig(Section):
    """What `python -m headrace.run.evaluation` reads."""

    base: Path = Field(description="the folder that paths of the agent are below")
    gateway: str = Field(description="its address; its keys are in HEADRACE_API_KEY and HEADRACE_REWARD_KEY")
    pool: str = Field(description=f"its address; its key is in {KEY_VARIABLE}")
    model: str = Field(description="whose tokenizer turns answers back into text")
    data: DataConfig
    agent: AgentConfig
    name: str = Field(description="of this evaluation, in trajectories' names")
    into: Path = Field(description="the file of the result, as JSON")
    step: int = Field(0, ge=0, description="the training step that it stands for")
    rows: int | None = Field(None, ge=1, description="so many of the rows, from the first; default: all")
    rollouts: int | None = Field(None, ge=1, description="of each row; default: data.val_rollouts")
    concurrency: int = Field(64, ge=1)
    by: list[str] = Field([], description="columns whose values get a mean each")
    pass_reward: float = Field(1.0, description="the reward from which on a rollout counts as passed")
    sampling: EvaluationSampling = EvaluationSampling()


async def evaluate(config: EvaluationConfig) -> EvaluationResult:
    """Plays the rows and waits for their rewards; returns what it came to. Raises `HeadraceError` where the
    gateway refuses the keys, or stays away from the first rollout to the last, and `CancelledError` where SIGTERM ended
    what played."""
    began = time.monotonic()
    rows = config.data.val_rows(config.base) or config.data.train_rows(config.base)
    assert rows is not None
    rollouts = config.rollouts or config.data.val_rollouts
    chosen = list(rows)[: config.rows]
    tasks = [
        (at, rollout, task_of(config, row, at, rollout)) for at, row in enumerate(chosen) for rollout in range(rollouts)
    ]
    client = GatewaySource(address=config.gateway).client(config.gateway)
    try:
        flow = config.agent.made(client, config.base)
        try:
            failures = await play_all([task for _, _, task in tasks], flow, config.concurrency)
        finally:
            await flow.aclose()
    finally:
        await client.aclose()
    wanted = {task.trajectory_uid for _, _, task in tasks} - failures.keys()
    found = await asyncio.to_thread(_scored, config.pool, wanted, failures)
    decode = _decoder(config.model)
    played = [
        _rollout(at, rollout, task, found.get(task.trajectory_uid), failures, config.by, decode)
        for at, rollout, task in tasks
    ]
    seconds = time.monotonic() - began
    return summary(config.name, config.step, played, rollouts=rollouts, pass_reward=config.pass_reward, seconds=seconds)


def task_of(config: EvaluationConfig, row: dict[str, Any], at: int, rollout: int) -> Task:
    """A rollout of the row at a place of the data."""
    return Task(
        row=row,
        prompt_uid=f"{config.name}-{at}-{rollout}",
        rollout=0,
        n_rollouts=1,
        channel=VAL,
        hidden=tuple(config.data.hidden),
        prompt=config.data.prompt,
        sampling=config.sampling.model_dump(exclude_none=True),
    )


async def play_all(tasks: Sequence[Task], flow: RolloutPlayer, concurrency: int) -> dict[str, str]:
    """Plays all tasks, so many at once; returns why some failed, by their trajectories. Raises `GatewayRefused` where
    the gateway refuses the keys, and `HeadraceError` where it failed all of them. SIGTERM cancels it: every rollout has
    been ended then, with all that it started."""
    failures: dict[str, str] = {}
    unanswered: list[HeadraceError] = []
    free = asyncio.Semaphore(concurrency)

    async def play(task: Task) -> None:
        async with free:
            try:
                await flow.run(task)
            except AgentFailed as error:
                failures[task.trajectory_uid] = str(error)
            except (GatewayRefused, NoAnswer) as error:
                if isinstance(error, GatewayRefused) and error.status in WRONG_KEY:
                    raise
                failures[task.trajectory_uid] = str(error)
                unanswered.append(error)

    try:
        with _sigterm_cancels():
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(play(task))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if tasks and len(unanswered) == len(tasks):
        raise HeadraceError(f"none of {len(tasks)} rollouts could be played: {unanswered[-1]}")
    return failures


@contextmanager
def _sigterm_cancels() -> Iterator[None]:
    """Has SIGTERM cancel the task in the context. A second one, and one outside, ends this process at once: agents run
    nowhere else."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def cancel() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _scored(pool: str, wanted: set[str], failures: dict[str, str]) -> dict[str, Trajectory]:
    """The trajectories as they become ready, by uid; what will have no reward is added to `failures`."""
    found: dict[str, Trajectory] = {}
    waiting = set(wanted)
    news_at = time.monotonic()
    with connect(pool, key=configured_key(None, KEY_VARIABLE)) as there:
        while waiting:
            batch = there.fetch_batch(1, channel=VAL, timeout=ASK_S)
            before = len(waiting)
            if batch is not None:
                for group in batch.groups:
                    for trajectory in group.trajectories:
                        if trajectory.uid in waiting:
                            waiting.discard(trajectory.uid)
                            found[trajectory.uid] = trajectory
            else:
                lost = without_reward(there, waiting, quiet=time.monotonic() - news_at > QUIET_S)
                waiting.difference_update(lost)
                failures.update(lost)
            if len(waiting) < before:
                news_at = time.monotonic()
    return found


def without_reward(pool: BlockingPool, uids: Collection[str], *, quiet: bool) -> dict[str, str]:
    """Why trajectories will have no reward, by uid: they are gone from the pool, as what failed and what was dropped
    is, or it was `quiet` for too long. Those that may yet have one are left out."""
    found: dict[str, str] = {}
    for uid in sorted(uids):
        try:
            state = pool.trajectory(uid, channel=VAL).state
        except NotFound as error:
            found[uid] = str(error)
        else:
            if quiet:
                found[uid] = f"no reward ({state})"
    return found


def _rollout(
    at: int,
    rollout: int,
    task: Task,
    trajectory: Trajectory | None,
    failures: Mapping[str, str],
    by: Sequence[str],
    decode: Callable[[list[int]], str],
) -> EvaluatedRollout:
    values = {name: str(task.row.get(name)) for name in by}
    uid = task.trajectory_uid
    if trajectory is None:
        return EvaluatedRollout(at, rollout, uid, None, failures.get(uid), by=values)
    last = trajectory.steps[-1]
    parts = last.metadata.get("reward_extra_info") or {}
    text = decode(last.response_ids.tolist())
    failure = NOBODY_SCORED if trajectory.reward is None else None
    return EvaluatedRollout(at, rollout, uid, trajectory.reward, failure, text, len(trajectory), parts, values)


def _decoder(model: str) -> Callable[[list[int]], str]:
    """What turns ids into text; into nothing where the model has no `tokenizer.json`."""
    from tokenizers import Tokenizer

    file = model_folder(model) / "tokenizer.json"
    if not file.exists():
        return lambda ids: ""
    tokenizer = Tokenizer.from_file(str(file))

    def decode(ids: list[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        return text

    return decode


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.run.evaluation", description="Play held-out data once.")
    parser.add_argument("config", type=Path)
    path: Path = parser.parse_args(args).config
    config = checked(EvaluationConfig, read(path), path)
    try:
        result = asyncio.run(evaluate(config))
    except (HeadraceError, NoAnswer) as error:
        raise SystemExit(f"headrace: {error}") from None
    except asyncio.CancelledError:
        raise SystemExit(TERMINATED) from None
    write(result, config.into)
    print(f"evaluation ready at {config.into}", flush=True)


if __name__ == "__main__":
    main()
