"""Rollouts without a trainer: as many groups as asked, several at a time, and what happens where items fail."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.envs.kit import CountingEnv, items_of

from headrace.data.errors import HeadraceError
from headrace.envs import BaseEnvConfig
from headrace.envs.files import GroupFile
from headrace.envs.process import Processing, process


@pytest.fixture(autouse=True)
def page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in place of the page, which takes a process of its own: test_page has the real one."""

    def written(lines: Path, **options: Any) -> None:
        lines.with_suffix(".html").write_text(str(options))

    monkeypatch.setattr("headrace.envs.process.write_page", written)


def made(folder: Path, most: int | None = None, **fields: Any) -> CountingEnv:
    given: dict[str, Any] = {"group_size": 2, "max_num_workers": 4, "use_wandb": False}
    return CountingEnv(
        BaseEnvConfig(data_path_to_save_groups=str(folder / "groups.jsonl"), **{**given, **fields}), most
    )


def groups(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]


async def test_as_many_groups_are_made_as_asked_and_no_item_too_many(tmp_path: Path) -> None:
    env = made(tmp_path)
    await process(env, 10)
    assert sorted(items_of(groups(tmp_path))) == list(range(10))
    assert (env.next, env.curr_step, env.counts.groups) == (10, 10, 10)
    assert (tmp_path / "groups.html").exists()


async def test_several_items_are_rolled_out_at_a_time(tmp_path: Path) -> None:
    env = made(tmp_path, max_num_workers=3)
    together = asyncio.Barrier(3 * env.config.group_size)

    async def play(item: int) -> None:
        await together.wait()

    env.play = play
    await process(env, 6)
    assert len(groups(tmp_path)) == 6


async def test_it_ends_where_items_end(tmp_path: Path) -> None:
    env = made(tmp_path, most=3)
    await process(env, 10)
    assert sorted(items_of(groups(tmp_path))) == [0, 1, 2]


async def test_an_item_that_comes_to_nothing_is_replaced(tmp_path: Path) -> None:
    env = made(tmp_path)

    async def play(item: int) -> None:
        if item % 2:
            raise ValueError(f"item {item} cannot be played")

    env.play = play
    await process(env, 5)
    assert sorted(items_of(groups(tmp_path))) == [0, 2, 4, 6, 8]
    assert env.counts.failed["rollout"] > 0


async def test_items_for_later_are_rolled_out_before_new_ones(tmp_path: Path) -> None:
    env = made(tmp_path, max_num_workers=1)
    collect = env.collect_trajectories

    async def collect_trajectories(item: int) -> Any:
        found, _ = await collect(item)
        return found, [item + 100] if item < 100 else []

    env.collect_trajectories = collect_trajectories  # type: ignore[method-assign]
    await process(env, 4)
    assert items_of(groups(tmp_path)) == [0, 100, 1, 101]


async def test_where_every_item_fails_the_reason_is_told(tmp_path: Path) -> None:
    env = made(tmp_path)

    async def play(item: int) -> None:
        raise ValueError("no server is there")

    env.play = play
    with pytest.raises(HeadraceError, match=r"items in a row came to nothing .*the last one with: no server is there"):
        await process(env, 5)
    assert env.max_failures is not None
    assert env.next < env.max_failures + 2 * env.max_num_workers
    assert not env.workers


async def test_an_item_that_hangs_is_given_up(tmp_path: Path) -> None:
    env = made(tmp_path, worker_timeout=0.2)

    async def play(item: int) -> None:
        if item == 1:
            await asyncio.Event().wait()

    env.play = play
    await process(env, 4)
    assert 1 not in items_of(groups(tmp_path))
    assert env.counts.failed["timeout"] >= 1


async def test_a_disk_that_is_full_ends_it_and_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = made(tmp_path, max_num_workers=1)
    write = GroupFile.write

    def full(file: GroupFile, group: Any) -> None:
        if len(groups(tmp_path)) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, group)

    monkeypatch.setattr(GroupFile, "write", full)
    with pytest.raises(HeadraceError, match=r"groups cannot be written: .*No space left"):
        await process(env, 5)
    assert len(groups(tmp_path)) == 2
    assert (tmp_path / "groups.html").exists()


async def test_a_stop_lets_items_under_way_end_and_a_second_one_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace.envs")
    env = made(tmp_path, max_num_workers=2)
    await env.setup()
    begun, go = asyncio.Semaphore(0), asyncio.Event()

    async def play(item: int) -> None:
        begun.release()
        await (go.wait() if item < 2 else asyncio.Event().wait())

    env.play = play
    processing = Processing(env, 10)
    task = asyncio.create_task(processing.run())
    for _ in range(4):
        await begun.acquire()
    processing.stop.request()
    go.set()
    await task
    assert (processing.done, env.next) == (2, 2)
    assert "2 items are finished before the end; stop again to break them off" in caplog.text

    again = Processing(env, 10)
    task = asyncio.create_task(again.run())
    for _ in range(4):
        await begun.acquire()
    again.stop.request()
    again.stop.request()
    await task
    assert (again.done, len(env.workers)) == (0, 0)
    await env.close()


async def test_a_run_without_a_group_leaves_neither_file_nor_page(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="there are no items"):
        await process(made(tmp_path, most=0), 2)
    assert [*tmp_path.iterdir()] == []

    await process(made(tmp_path), 2)
    assert len(groups(tmp_path)) == 2


async def test_a_number_of_groups_must_be_known(tmp_path: Path) -> None:
    env = made(tmp_path)
    with pytest.raises(HeadraceError, match="total_steps is -1"):
        await process(env, -1)
    await env.close()
