"""Scored groups with a journal: what was acknowledged is there again, after a close, a kill or a snapshot."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.pool.journal.kit import Crashing, check_rules, dump, flip, frames, one, same, segment
from tests.pool.kit import Clock, drain
from tests.pool.scored.kit import (
    drained,
    environment,
    joined,
    names,
    piece,
    post,
    posting,
    scored_stats,
    started,
    trainer,
)

from headrace import DataPool
from headrace.pool.errors import JournalError, LeaseLost
from headrace.pool.journal.repair import repair
from headrace.pool.readonly import JournalView
from headrace.pool.scored.types import Posted, ScoredStatus


def busy(pool: DataPool) -> str:
    """Something of everything; returns the lease that is still out."""
    started(pool)
    first = joined(pool)
    second = joined(pool, desired_name="chess", group_size=4, min_batch_allocation=0.5)
    for name in range(6):
        post(pool, name, first, key=f"k{name}")
    post(pool, 10, second, 3)
    post(pool, 11, second, 4)
    post(pool, 12, sequences=9)
    done = pool.desk_batch("done")
    assert done is not None
    pool.desk_ack(done.lease)
    pool.desk_disconnect(first)
    out = pool.desk_batch("out")
    assert out is not None
    return out.lease


@pytest.mark.parametrize("compacted", [False, True])
def test_everything_is_there_again(tmp_path: Path, compacted: bool) -> None:
    with DataPool(tmp_path, durability="os") as pool:
        lease = busy(pool)
        if compacted:
            pool.compact()
            post(pool, 20, key="after")
        before, counted = dump(pool._state), scored_stats(pool)
        answer = pool.desk_batch("out")
    with DataPool(tmp_path, durability="os") as pool:
        assert same(before, dump(pool._state))
        check_rules(pool._state)
        assert {**counted, "duplicates": 0} == scored_stats(pool)
        assert pool.desk_batch("out") == answer
        pool.desk_ack(lease)
        assert post(pool, 3, 0, key="k3") == Posted("received", duplicate=True)
        left = pool.desk_register_env(environment())
        assert left is not None
        assert (left.env_id, left.wandb_name) == (2, "maze_1")


@pytest.mark.parametrize("compacted", [False, True])
def test_a_reopened_desk_holds_who_was_held_and_gives_a_condemned_size_no_time_again(
    tmp_path: Path, compacted: bool
) -> None:
    with DataPool(tmp_path, durability="os") as pool:
        started(pool, batch_size=12)
        env = joined(pool, group_size=8)
        pool.desk_post([posting(name, env, 8) for name in range(3)])
        if compacted:
            pool.compact()
        before = pool.desk_env_status(env)
        assert before.queue_size == 3
    with DataPool(tmp_path, durability="os") as pool:
        assert pool.desk_env_status(env) == before
        assert "batch_size 12" in post(pool, 9, env, 8).misfit
        assert scored_stats(pool)["dead_letters"] == {"unmatched": 4}


@pytest.mark.parametrize("compacted", [False, True])
def test_a_reopened_desk_condemns_no_group_that_was_not_condemned_before(tmp_path: Path, compacted: bool) -> None:
    with DataPool(tmp_path, durability="os") as pool:
        started(pool, batch_size=6)
        pool.desk_post([posting(name, None, size) for name, size in enumerate([5, 5, 1, 5])])
        batch = pool.desk_batch()
        assert (names(batch), scored_stats(pool)["dead_letters"]) == ([0, 2], {}), "those that are out may come back"
        assert batch is not None
        pool.desk_ack(batch.lease)
        if compacted:
            pool.compact()
        before, counted = dump(pool._state), scored_stats(pool)
        assert counted["dead_letters"] == {"unmatched": 2}, "five and five are never six"
    with DataPool(tmp_path, durability="os") as pool:
        assert scored_stats(pool) == counted
        assert same(before, dump(pool._state))


@pytest.mark.parametrize(
    ("lost", "left", "counts"),
    [
        (4, [3, 4], {"posted": 4, "served": 1, "dead_letters": {"damaged": 1}}),  # a group
        (6, [2, 3, 4], {"posted": 4, "served": 1, "dead_letters": {}}),  # that the batch arrived
    ],
)
def test_a_repair_counts_the_groups_that_were_lost(
    tmp_path: Path, lost: int, left: list[int], counts: dict[str, Any]
) -> None:
    with DataPool(tmp_path, durability="os") as pool:
        started(pool, batch_size=2)
        post(pool, 1)
        post(pool, 2)
        batch = pool.desk_batch()
        assert batch is not None
        pool.desk_ack(batch.lease)
        post(pool, 3)
        post(pool, 4)
    flip(segment(tmp_path), frames(segment(tmp_path))[lost][0] + 45)
    repair(tmp_path)
    with DataPool(tmp_path, durability="os") as pool:
        check_rules(pool._state)
        found = scored_stats(pool)
        assert {name: found[name] for name in counts} == counts
        assert drained(pool) == left


def test_a_snapshot_is_taken_while_groups_come_and_go(tmp_path: Path) -> None:
    """What the snapshot refers to stays readable, though the pool has let it go by the time that it is written."""
    with DataPool(tmp_path, durability="os") as pool:
        started(pool)
        for name in range(8):
            post(pool, name)
        write = pool._journal.write_snapshot  # type: ignore[union-attr]

        def late(*captured: Any) -> None:
            assert drained(pool) == list(range(8))
            write(*captured)

        pool._journal.write_snapshot = late  # type: ignore[union-attr, method-assign]
        pool.compact()
        post(pool, 9, sequences=4)
    with DataPool(tmp_path, durability="os") as pool:
        assert (drained(pool), scored_stats(pool)["served"]) == ([9], 9)


def test_a_lease_that_ran_out_puts_the_groups_back_and_takes_the_step_back(tmp_path: Path) -> None:
    clock = Clock()
    with DataPool(tmp_path, durability="os", clock=clock) as pool:
        started(pool)
        post(pool, 1, sequences=4)
        batch = pool.desk_batch(lease_s=10)
        assert batch is not None
        clock.forward(9)
        assert pool.desk_status() == ScoredStatus(1, 0)
    clock.forward(2)
    with DataPool(tmp_path, durability="os", clock=clock) as pool:
        assert pool.desk_status() == ScoredStatus(0, 1)
        with pytest.raises(LeaseLost):
            pool.desk_ack(batch.lease)
        assert names(pool.desk_batch()) == [1]


@pytest.mark.parametrize("restart", [False, True])
def test_a_lease_runs_out_though_the_clock_was_set_back(tmp_path: Path, restart: bool) -> None:
    clock = Clock(100_000.0)
    pool = DataPool(tmp_path, durability="os", clock=clock)
    started(pool)
    post(pool, 1, sequences=4)
    assert pool.desk_batch(lease_s=10) is not None
    clock.forward(-50_000)
    if restart:
        pool.close()
        pool = DataPool(tmp_path, durability="os", clock=clock)
    assert pool.desk_batch() is None
    clock.forward(11)
    assert names(pool.desk_batch()) == [1]
    pool.close()


def test_a_silent_environment_has_no_weight_until_it_calls_again(tmp_path: Path) -> None:
    clock = Clock()
    with DataPool(tmp_path, durability="os", clock=clock) as pool:
        started(pool)
        loud, silent = joined(pool), joined(pool)
        clock.forward(30)
        assert pool.desk_env_status(loud, 60).env_weight == 0.5
        clock.forward(40)
        assert pool.desk_env_status(loud).env_weight == 0.5, "nobody asked for a heartbeat"
        assert pool.desk_env_status(loud, 60).env_weight == 1.0
    with DataPool(tmp_path, durability="os", clock=clock) as pool:
        assert pool.desk_env_status(loud, 60).env_weight == 1.0
        post(pool, 1, silent)
        assert pool.desk_env_status(loud, 60).env_weight == 0.5


def test_a_caller_who_gives_up_while_its_batch_is_written_down_leaves_it_to_the_next(tmp_path: Path) -> None:
    async def give_up(pool: DataPool) -> None:
        task = asyncio.create_task(pool.aio.desk_batch(lease_s=1e6))
        while not pool._state.scored.leases:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with DataPool(tmp_path, durability="fsync") as pool:
        started(pool)
        post(pool, 1, sequences=4)
        asyncio.run(give_up(pool))
        assert names(pool.desk_batch()) == [1]


def test_a_journal_without_a_desk_opens_and_takes_one(tmp_path: Path) -> None:
    with DataPool(tmp_path, durability="os") as pool:
        pool.submit_step(one("t"))
        pool.compact()
    assert b"desk" not in b"".join(path.read_bytes() for path in tmp_path.glob("0*"))
    with DataPool(tmp_path, durability="os") as pool:
        started(pool)
        post(pool, 1, sequences=4)
    with DataPool(tmp_path, durability="os") as pool:
        assert (drained(pool), drain(pool)) == ([1], ["t"])


def test_a_journal_at_rest_shows_its_desk_and_nothing_is_written(tmp_path: Path) -> None:
    with DataPool(tmp_path, durability="os") as pool:
        busy(pool)
        status, info = pool.desk_status(), pool.desk_info()
    before = {path: path.read_bytes() for path in sorted(tmp_path.iterdir()) if path.is_file()}
    with JournalView(tmp_path) as view:
        assert (view.desk_status(), view.desk_info()) == (status, info)
        assert view.desk_latest() == piece(12, 9)
    assert before == {path: path.read_bytes() for path in sorted(tmp_path.iterdir()) if path.is_file()}


@pytest.mark.parametrize("compacted", [False, True])
def test_a_repair_leaves_a_desk_that_keeps_its_rules_and_serves_what_is_left(tmp_path: Path, compacted: bool) -> None:
    model = tmp_path / "model"
    with DataPool(model, durability="os") as pool:
        busy(pool)
        if compacted:
            pool.compact()
    path = model / "000000000002.snap" if compacted else segment(model)
    for at, (start, _) in enumerate(frames(path)):
        copy = tmp_path / str(at)
        subprocess.run(["cp", "-r", model, copy], check=True)
        flip(copy / path.name, start + 30)
        repair(copy)
        with DataPool(copy, durability="os") as pool:
            check_rules(pool._state)
            pool.desk_register(trainer())
            for lease in list(pool._state.scored.leases):
                pool.desk_nack(lease)
            found = drained(pool)
            assert len(found) == len(set(found))
            check_rules(pool._state)


VICTIM = """
import os, signal, sys, json
from headrace import DataPool
from tests.pool.scored.kit import *
pool = DataPool(sys.argv[1], durability="os")
started(pool)
env = joined(pool)
for name in range(100):
    post(pool, name, env, key=str(name))
    print(json.dumps(["posted", name]), flush=True)
    if name % 4 == 3:
        batch = pool.desk_batch()
        print(json.dumps(["taken", names(batch)]), flush=True)
        if name % 8 == 7:
            pool.desk_ack(batch.lease)
            print(json.dumps(["acked", names(batch)]), flush=True)
        else:
            pool.desk_nack(batch.lease)
    if name == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_desk_serves_every_group_that_was_not_acknowledged_exactly_once(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    victim = subprocess.run(
        [sys.executable, "-c", VICTIM, str(tmp_path), "45"], stdout=subprocess.PIPE, cwd=root, env=os.environ
    )
    assert victim.returncode == -signal.SIGKILL
    told = [json.loads(line) for line in victim.stdout.decode().splitlines()]
    posted = [name for what, name in told if what == "posted"]
    acked = [name for what, found in told if what == "acked" for name in found]
    assert acked
    with DataPool(tmp_path, durability="os") as pool:
        check_rules(pool._state)
        again = [post(pool, name, 0, key=str(name)).duplicate for name in posted]
        assert all(again)
        assert sorted(drained(pool) + acked) == posted


def test_a_post_that_the_journal_could_not_take_is_not_there(tmp_path: Path) -> None:
    files = Crashing()
    pool = DataPool(tmp_path, durability="os", files=files)
    started(pool)
    post(pool, 1, key="kept")
    files.crash()
    with pytest.raises(JournalError):
        pool.desk_post([posting(2, key="lost")])
    with DataPool(tmp_path, durability="os") as again:
        assert scored_stats(again)["queued"] == 1
        assert post(again, 1, key="kept").duplicate
        assert not post(again, 2, key="lost").duplicate
