"""Rollouts that raise, hang or return rubbish are counted, and the others do not notice."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest
from tests.envs.api import Api
from tests.envs.kit import CountingEnv, config, items_of, rollout, running

from headrace.envs.files import GroupFile


async def test_a_rollout_that_raises_costs_its_group_and_is_told_with_its_traceback(api: Api) -> None:
    env = CountingEnv(config(api), most=4)

    async def play(item: int) -> None:
        if item == 1:
            raise ZeroDivisionError("in the author's code")

    env.play = play
    async with running(env):
        await api.until(lambda: len(api.received) == 3)
    assert sorted(items_of(api.received)) == [0, 2, 3]
    assert env.counts.failed["rollout"] >= 1
    assert any("in play" in text and "in the author's code" in text for text in env.counts.tracebacks)


async def test_a_rollout_that_raises_is_made_again_as_configured(api: Api) -> None:
    env = CountingEnv(config(api, rollout_retries=2), most=1)
    failures = [ConnectionError("once"), ConnectionError("twice")]

    async def play(item: int) -> None:
        if failures:
            raise failures.pop()

    env.play = play
    async with running(env):
        await api.until(lambda: len(api.received) == 1)
    assert env.counts.failed == {"rollout": 2}
    assert env.made == {0: 4}


async def test_a_rollout_that_hangs_past_its_time_is_broken_off_and_its_place_is_free_again(api: Api) -> None:
    env = CountingEnv(config(api, max_num_workers=1, worker_timeout=0.1))

    async def play(item: int) -> None:
        if item == 0:
            await asyncio.Event().wait()

    env.play = play
    async with running(env):
        await api.until(lambda: len(api.received) >= 1)
    assert 0 not in items_of(api.received)
    assert env.counts.failed["timeout"] >= 1


class Cleaning(CountingEnv):
    """Knows how often it cleaned up to the end."""

    cleaned = 0

    async def cleanup(self) -> None:
        await asyncio.sleep(0)
        self.cleaned += 1


async def test_it_is_cleaned_up_after_an_item_that_ran_out_of_time(api: Api) -> None:
    env = Cleaning(config(api, worker_timeout=0.1), most=1)

    async def play(item: int) -> None:
        await asyncio.Event().wait()

    env.play = play
    async with running(env):
        await api.until(lambda: env.counts.failed["timeout"] == 1)
    assert env.cleaned == 1


async def test_it_is_cleaned_up_after_an_item_whose_sending_failed(api: Api) -> None:
    class Unsending(Cleaning):
        async def handle_send_to_api(self, *args: Any, **options: Any) -> None:
            raise RuntimeError("in the author's code")

    env = Unsending(config(api, max_num_workers=1), most=1)
    async with running(env):
        await api.until(lambda: env.counts.failed["item"] == 1)
    assert env.cleaned == 1


async def test_a_finished_group_that_waits_for_room_has_no_time_limit_any_more(api: Api) -> None:
    api.refuse = lambda groups: 503
    env = CountingEnv(config(api, worker_timeout=600, spool_max_mb=1), most=2)
    long = [7] * 200_000

    async def play(item: int) -> Any:
        return {"tokens": long, "masks": long, "scores": env.made[item] % 2, "messages": []}

    env.play = play
    api.max_token_len = -1
    async with running(env):
        await api.until(lambda: env.manager is not None and env.manager.sender.accepted == 2)
        assert env.manager is not None
        timeouts = env.manager._timeouts
        await api.until(lambda: len(timeouts) == 1)  # the one that had room has ended
        (waiting,) = timeouts.values()
        assert waiting.when() is None
        api.refuse = lambda groups: None
        await api.until(lambda: len(api.received) == 2)
    assert env.counts.failed == {}


@pytest.mark.parametrize(
    "rubbish",
    [
        {"tokens": [1], "masks": [1, 2], "scores": 1.0},
        {"tokens": [1], "masks": [1], "scores": float("nan")},
        {"tokens": [1], "masks": [1], "scores": "much"},
        {"tokens": None, "masks": None, "scores": None},
        "a text",
        17,
    ],
)
async def test_rubbish_is_counted_and_not_sent(api: Api, rubbish: Any) -> None:
    env = CountingEnv(config(api), most=2)

    async def play(item: int) -> Any:
        return rubbish if item == 0 else None

    env.play = play
    async with running(env):
        await api.until(lambda: len(api.received) == 1)
    assert items_of(api.received) == [1]
    assert env.counts.failed["rubbish"] >= 1


class Odd(CountingEnv):
    """Returns what a test says from `collect_trajectories`."""

    results: list[Any]

    async def collect_trajectories(self, item: int) -> Any:
        return self.results[item] if item < len(self.results) else await super().collect_trajectories(item)


async def test_a_whole_group_that_is_no_group_is_counted_and_not_sent(api: Api) -> None:
    env = Odd(config(api), most=6)
    env.results = [None, ("alone",), ([], []), ({"tokens": []}, []), (None, [77])]
    async with running(env):
        await api.until(lambda: len(api.received) == 2)
    assert sorted(items_of(api.received)) == [5, 77]
    assert env.counts.failed == {"rubbish": 3}


async def test_groups_of_equal_scores_and_long_ones_are_skipped_with_a_reason(api: Api) -> None:
    env = CountingEnv(config(api), most=3)

    async def play(item: int) -> Any:
        if item == 0:
            return rollout(item, 1.0)
        return {"tokens": [1] * 64, "masks": [1] * 64, "scores": env.made[item], "messages": []} if item == 1 else None

    env.play = play
    async with running(env):
        await api.until(lambda: len(api.received) == 1 and sum(env.counts.skipped.values()) == 2)
    assert items_of(api.received) == [2]
    assert env.counts.skipped == {"equal_scores": 1, "too_long": 1}


async def test_a_full_disk_under_the_file_of_groups_costs_no_group(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: GroupFile, group: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(GroupFile, "write", full)
    env = CountingEnv(config(api, data_path_to_save_groups=str(tmp_path / "groups.jsonl")), most=2)
    async with running(env):
        await api.until(lambda: len(api.received) == 2)
    assert env.counts.failed == {"data_path_to_save_groups": 2}


async def test_an_item_source_that_keeps_failing_ends_the_environment_with_its_error(api: Api) -> None:
    class Broken(CountingEnv):
        async def get_next_item(self) -> int | None:
            if self.next == 2:
                raise LookupError("the dataset is gone")
            return await super().get_next_item()

    env = Broken(config(api))
    with pytest.raises(LookupError, match="the dataset is gone"):
        await env.env_manager()
    assert sorted(items_of(api.received)) == [0, 1]
    assert api.left == [0]


async def test_a_setup_that_fails_ends_the_environment_and_leaves_nothing_open(api: Api) -> None:
    class Broken(CountingEnv):
        async def setup(self) -> None:
            raise FileNotFoundError("questions.jsonl")

    with pytest.raises(FileNotFoundError, match=r"questions\.jsonl"):
        await Broken(config(api)).env_manager()
    assert api.asked == []
