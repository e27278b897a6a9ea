"""An environment at work for a trainer: what it does in order, when it holds, and how it ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from tests.envs.api import Api
from tests.envs.kit import CountingEnv, config, items_of, running


async def test_an_environment_registers_sends_groups_and_leaves(api: Api) -> None:
    env = CountingEnv(config(api, wandb_name="mine"), most=3)
    async with running(env):
        await api.until(lambda: len(api.received) == 3)
    assert api.environments[0] | {"weight": None} == {
        "max_token_length": 2048,
        "desired_name": "mine",
        "weight": None,
        "min_batch_allocation": None,
        "group_size": 2,
    }
    assert sorted(items_of(api.received)) == [0, 1, 2]
    assert [group["scores"] for group in api.received] == [[1, 0]] * 3
    assert {group["env_id"] for group in api.received} == {0}
    assert api.left == [0]


async def test_it_waits_for_the_trainer_to_begin(api: Api) -> None:
    api.started = False
    env = CountingEnv(config(api), most=1)
    async with running(env):
        await api.until(lambda: [what for what, _ in api.asked].count("register") >= 3)
        assert env.next == 0
        api.started = True
        await api.until(lambda: len(api.received) == 1)


async def test_an_api_that_is_away_as_it_begins_is_waited_for(api: Api) -> None:
    api.away = {"info": 2, "wandb_info": 2, "register": 2}
    env = CountingEnv(config(api), most=1)
    async with running(env):
        await api.until(lambda: len(api.received) == 1)
    assert api.away == {"info": 0, "wandb_info": 0, "register": 0}


async def test_a_stop_while_it_waits_for_the_trainer_is_heard(api: Api) -> None:
    api.started = False
    env = CountingEnv(config(api))
    async with running(env):
        await api.until(lambda: bool(api.asked))
    assert api.left == []
    assert env.next == 0


async def test_it_ends_by_itself_once_more_batches_are_there_than_steps(api: Api) -> None:
    env = CountingEnv(config(api, total_steps=1, max_batches_offpolicy=8))
    async with running(env) as task:
        await task
    assert sum(len(group["scores"]) for group in api.received) >= 2 * api.batch_size
    assert api.left == [0]


async def test_work_is_held_above_the_threshold_and_goes_on_at_it(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 2, batches of 16, at most one batch in the queue: nine groups are too many, eight are not. Each pause
    and its end is an event in wandb, and a line of the file."""
    wandb = MagicMock()
    monkeypatch.setattr("headrace.envs.metrics.Wandb", wandb)
    file = tmp_path / "m.jsonl"
    env = CountingEnv(config(api, max_batches_offpolicy=1, metrics_path=str(file)))
    env.metrics_log.open_wandb("tests", group=None, name=None, config={})
    async with running(env):
        await api.until(lambda: len(api.received) == 9)
        asked = len(api.asked)
        await api.until(lambda: len(api.asked) >= asked + 5)
        assert env.next == 9
        assert env.counts.pauses >= 1
        del api.queue[0]
        await api.until(lambda: len(api.received) == 10)
        asked = len(api.asked)
        await api.until(lambda: len(api.asked) >= asked + 5)
        assert env.next == 10
    assert sorted(items_of(api.received)) == list(range(10))
    named = env.wandb_prepend
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    told = [call.args[0] for call in wandb().write.call_args_list]
    for rows, prefix in ((lines, ""), (told, f"{named}_")):
        events = [row for row in rows if any("event/" in name for name in row)]
        kinds = ["paused" if f"{prefix}event/paused" in row else "resumed" for row in events]
        assert kinds == ["paused", "resumed"] * (len(kinds) // 2) + ["paused"] * (len(kinds) % 2)
        assert len(kinds) >= 3
        assert events[0][f"{prefix}event/paused"] == events[1][f"{prefix}event/resumed"] == 1
        assert events[0][f"{prefix}event/paused/queued"] + events[0][f"{prefix}event/paused/coming"] >= 9
        assert events[1][f"{prefix}event/resumed/after_s"] > 0


async def test_work_in_flight_is_finished_and_sent_when_it_is_told_to_stop(api: Api) -> None:
    env = CountingEnv(config(api))
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def play(item: int) -> None:
        begun.release()
        await go_on.wait()

    env.play = play
    task = asyncio.create_task(env.env_manager())
    for _ in range(8):
        await begun.acquire()
    assert env.manager is not None
    env.manager.stop.request()
    go_on.set()
    await task
    assert sorted(items_of(api.received)) == [0, 1, 2, 3]
    assert api.left == [0]


async def test_a_second_request_breaks_work_off(api: Api) -> None:
    env = CountingEnv(config(api))
    begun = asyncio.Event()

    async def play(item: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    env.play = play
    task = asyncio.create_task(env.env_manager())
    await begun.wait()
    assert env.manager is not None
    env.manager.stop.request()
    env.manager.stop.request()
    await task
    assert api.received == []
    assert api.left == [0]


async def test_an_api_that_was_started_anew_is_registered_with_again_and_gets_what_is_owed(api: Api) -> None:
    api.environments.append({"group_size": 1})
    api.refuse = lambda groups: 503
    env = CountingEnv(config(api), most=2)
    async with running(env):
        await api.until(lambda: [what for what, _ in api.asked].count("refused") >= 1)
        assert env.env_id == 1
        api.environments.clear()
        await api.until(lambda: any(what == "refused" and sent[0]["env_id"] == 0 for what, sent in api.asked))
        assert env.env_id == 0
        api.refuse = lambda groups: None
        await api.until(lambda: len(api.received) == 2)
    assert [group["env_id"] for group in api.received] == [0, 0]


async def test_an_api_that_goes_away_in_the_middle_of_a_run_loses_nothing(api: Api) -> None:
    env = CountingEnv(config(api, max_batches_offpolicy=1))
    async with running(env):
        await api.until(lambda: len(api.received) >= 3)
        await api.stop()
        del api.queue[:]
        await api.start()
        await api.until(lambda: len(api.received) >= 12)
    assert sorted(items_of(api.received)) == list(range(env.next))
