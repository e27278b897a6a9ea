"""Promise 6: a channel holds so many groups. The oldest go first, or newcomers are refused, or they wait."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pool.kit import SOON, Threads, drain, events, fetched, group, ledger, prompts, step, until_blocked

from headrace.pool.errors import PoolFull


def ready(pool: Any, *names: str, **options: Any) -> None:
    pool.submit_steps([one for name in names for one in group(name)], **options)


def test_the_oldest_groups_make_room_each_with_a_reason(pool: Any) -> None:
    pool.configure(max_queue_size=2)
    pool.submit_steps([step("a"), step("a", 1)])
    ready(pool, "b", "c", "d")
    assert events(pool, "drop") == [
        {"group": "a", "steps": 2, "reason": "capacity"},
        {"group": "b", "steps": 1, "reason": "capacity"},
    ]
    assert ledger(pool) == {"submitted": 5, "queued": 2, "capacity": 3}
    assert pool.stats("train")["counts"]["groups_dropped_capacity"] == 2
    assert drain(pool) == ["c", "d"]


def test_more_steps_for_a_group_that_is_there_need_no_room(pool: Any) -> None:
    pool.configure(max_queue_size=1)
    for overflow in ("drop_oldest", "reject", "block"):
        pool.configure(overflow=overflow)
        pool.submit_step(step(overflow))
        pool.submit_step(step(overflow, 1, last=True))
        assert drain(pool) == [overflow]


def test_a_leased_group_is_never_dropped(pool: Any) -> None:
    pool.configure(max_queue_size=2)
    ready(pool, "a", "b")
    batch = fetched(pool, 1, lease_s=600)
    ready(pool, "c", "d")
    assert [event["group"] for event in events(pool, "drop")] == ["b", "c"]
    batch.nack()
    assert drain(pool) == ["a", "d"]


def test_with_all_the_room_leased_newcomers_go(pool: Any) -> None:
    pool.configure(max_queue_size=1)
    ready(pool, "a")
    batch = fetched(pool, lease_s=600)
    ready(pool, "b")
    assert ledger(pool) == {"submitted": 2, "leased": 1, "capacity": 1}
    batch.ack()
    assert drain(pool) == []


def test_a_smaller_channel_drops_what_is_too_much(pool: Any) -> None:
    ready(pool, *"abcd")
    pool.configure(max_queue_size=2)
    assert drain(pool) == ["c", "d"]


def test_a_channel_that_rejects_keeps_what_it_has(pool: Any) -> None:
    pool.configure(max_queue_size=2, overflow="reject")
    ready(pool, "a")
    with pytest.raises(PoolFull, match=r"1 of 2 groups .* 2 more; nothing was taken"):
        ready(pool, "b", "c")
    ready(pool, "b")
    with pytest.raises(PoolFull):
        pool.submit_steps([step("a/0", last=True, prompt="a"), *group("c")])
    with pytest.raises(PoolFull):
        pool.open("c", "c")
    pool.open("a/1", "a")
    assert ledger(pool) == {"submitted": 2, "queued": 2}
    fetched(pool)
    ready(pool, "c")
    assert drain(pool) == ["b", "c"]


@pytest.mark.parametrize("overflow", ["reject", "block"])
def test_a_smaller_channel_that_holds_newcomers_back_drops_nothing(pool: Any, overflow: str) -> None:
    ready(pool, *"abcd")
    pool.configure(max_queue_size=2, overflow=overflow)
    assert drain(pool) == [*"abcd"]


def test_a_leased_group_still_takes_its_room(pool: Any) -> None:
    pool.configure(max_queue_size=1, overflow="reject")
    ready(pool, "a")
    batch = fetched(pool, lease_s=600)
    with pytest.raises(PoolFull):
        ready(pool, "b")
    batch.ack()
    ready(pool, "b")
    assert drain(pool) == ["b"]


def test_a_channel_that_blocks_takes_a_submit_when_there_is_room(pool: Any, threads: Threads) -> None:
    pool.configure(max_queue_size=1, overflow="block")
    ready(pool, "a")
    waiting = threads.submit(ready, pool, "b")
    until_blocked(pool)
    assert prompts(fetched(pool)) == ["a"]
    waiting.result(SOON)
    assert drain(pool) == ["b"]


def test_a_blocked_submit_gives_up_when_its_time_is_over(pool: Any) -> None:
    pool.configure(max_queue_size=1, overflow="block")
    ready(pool, "a")
    for timeout in (0, 0.02):
        with pytest.raises(PoolFull, match="nothing was taken"):
            ready(pool, "b", timeout=timeout)
    with pytest.raises(PoolFull, match="no room to open"):
        pool.open("b", "b")
    assert ledger(pool) == {"submitted": 1, "queued": 1}


def test_a_submit_that_could_never_fit_does_not_wait(pool: Any) -> None:
    pool.configure(max_queue_size=2, overflow="block")
    with pytest.raises(PoolFull, match="3 more"):
        ready(pool, "a", "b", "c")


def test_writers_that_block_lose_nothing(pool: Any, threads: Threads) -> None:
    pool.configure(max_queue_size=2, overflow="block")
    names = [f"p{i}" for i in range(12)]
    writers = [threads.submit(ready, pool, name) for name in names]
    found = [prompts(fetched(pool))[0] for _ in names]
    for writer in writers:
        writer.result(SOON)
    assert sorted(found) == sorted(names)
    assert ledger(pool) == {"submitted": 12, "consumed": 12}
