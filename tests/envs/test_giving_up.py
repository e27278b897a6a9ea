"""An environment whose every item fails ends, and says why; what is skipped is a count, not a line each."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from tests.envs.api import Api
from tests.envs.kit import CountingEnv, config, running

from headrace.envs import BaseEnvConfig
from headrace.envs.metrics import (
    REPEAT_LOG_S,
    Counts,
    GaveUp,
    RepeatedEvents,
)
from headrace.envs.process import process
from headrace.envs.stop import StopRequest


async def failing(item: int) -> None:
    raise ZeroDivisionError("in the author's code")


async def test_items_that_fail_in_a_row_end_the_environment_with_the_last_error(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    env = CountingEnv(config(api, max_consecutive_failures=5, max_num_workers=1))
    env.play = failing
    with pytest.raises(GaveUp, match=r"5 items in a row came to nothing .*with: in the author's code"):
        await env.env_manager()
    assert env.next == 5
    assert api.left == [0]
    assert sum("in the author's code" in record.message for record in caplog.records) == 1


async def test_what_takes_too_long_and_what_is_no_group_counts_too(api: Api) -> None:
    env = CountingEnv(config(api, max_consecutive_failures=3, max_num_workers=1, worker_timeout=1.0))

    async def play(item: int) -> Any:
        return await asyncio.Event().wait() if item == 1 else {"tokens": [1], "masks": [1, 2], "scores": 1.0}

    env.play = play
    with pytest.raises(GaveUp, match=r"[3-9] items in a row came to nothing \(max_consecutive_failures is 3\)"):
        await env.env_manager()
    late, rubbish = env.counts.failed["timeout"], env.counts.skipped["rubbish"]
    assert late >= 1  # on a machine that is busy enough, so is the rubbish
    assert late + rubbish >= 3


async def test_a_group_between_failures_ends_the_row(api: Api) -> None:
    env = CountingEnv(config(api, max_consecutive_failures=2, max_num_workers=1), most=9)

    async def play(item: int) -> None:
        if item % 2:
            await api.until(lambda: len(api.received) == (item + 1) // 2)  # the one before is there
            await failing(item)

    env.play = play
    async with running(env):
        await api.until(lambda: len(api.received) == 5)
    assert env.counts.failed["rollout"] >= 4


async def test_any_number_may_fail_where_that_is_asked_for(api: Api) -> None:
    env = CountingEnv(config(api, max_consecutive_failures=0), most=40)

    async def play(item: int) -> None:
        if item < 39:
            await failing(item)

    env.play = play
    async with running(env):
        await api.until(lambda: len(api.received) == 1)
    assert env.next == 40


@pytest.mark.parametrize(("workers", "most"), [(1, 16), (8, 16), (64, 128)])
def test_by_default_two_rounds_of_the_workers_may_fail(workers: int, most: int) -> None:
    assert CountingEnv(BaseEnvConfig(max_num_workers=workers)).max_failures == most


async def test_process_whose_items_all_come_to_none_says_so_and_ends() -> None:
    class Nothing(CountingEnv):
        async def collect_trajectories(self, item: int) -> Any:
            return None, []

    env = Nothing(BaseEnvConfig(use_wandb=False, max_num_workers=1, max_consecutive_failures=4))
    with pytest.raises(GaveUp, match=r"4 items in a row came to nothing .*gave None, no group"):
        await process(env, 2)
    assert env.counts.skipped == {"no_group": 4}


async def test_process_counts_no_list_of_none_as_a_group() -> None:
    class Nothing(CountingEnv):
        async def collect_trajectories(self, item: int) -> Any:
            return [None, None], []

    env = Nothing(BaseEnvConfig(use_wandb=False, max_num_workers=1, max_consecutive_failures=4))
    with pytest.raises(GaveUp, match=r"4 items in a row came to nothing .*nothing came of its item"):
        await process(env, 2)
    assert env.counts.skipped == {"no_group": 8}


async def test_process_counts_no_group_that_it_leaves_out() -> None:
    env = CountingEnv(BaseEnvConfig(use_wandb=False, max_num_workers=1, max_consecutive_failures=3))

    async def play(item: int) -> Any:
        return {"tokens": [1], "masks": [1], "scores": 0.5, "messages": []}

    env.play = play
    with pytest.raises(GaveUp, match="all its scores are equal"):
        await process(env, 2)
    assert env.counts.groups == 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(caplog: pytest.LogCaptureFixture, do: Callable[[], None]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "headrace.envs"):
        do()
    return [record.message for record in caplog.records]


def test_what_is_skipped_is_told_first_and_then_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    counts = Counts(repeats=RepeatedEvents(clock))

    def skip(times: int) -> None:
        for _ in range(times):
            counts.skip("equal_scores")

    assert lines(caplog, lambda: skip(681)) == [
        "a group is not sent: all its scores are equal; more of them are counted"
    ]
    clock.now = REPEAT_LOG_S
    assert lines(caplog, lambda: skip(1)) == ["682 groups were not sent so far: all its scores are equal"]
    assert lines(caplog, counts.log_skipped) == [
        "groups that were not sent, in all: 682 because all its scores are equal"
    ]


async def test_while_it_waits_for_a_trainer_it_says_once_where_and_how_one_is_started(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    api.started = False
    caplog.set_level(logging.INFO, "headrace.envs")
    async with running(CountingEnv(config(api))):
        await api.until(lambda: [what for what, _ in api.asked].count("register") >= 4)
    (said,) = [record.message for record in caplog.records if "waiting for a trainer" in record.message]
    assert api.address in said
    assert "headrace train" in said
    assert "--serve-channel" in said


async def test_a_second_signal_interrupts_code_that_does_not_let_the_loop_run() -> None:
    stop = StopRequest()
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        await stop.asked.wait()


async def test_an_api_that_is_away_does_not_hold_up_who_stops_it(api: Api, tmp_path: Any) -> None:
    api.refuse = lambda groups: 503
    env = CountingEnv(config(api, spool_dir=str(tmp_path), drain_s=10**6), most=1)
    async with running(env):
        await api.until(lambda: any(what == "refused" for what, _ in api.asked))
    assert env.manager is not None
    assert env.manager.sender.waiting == 1
