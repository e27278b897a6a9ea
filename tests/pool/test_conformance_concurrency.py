"""Many at once: what is handed out is handed out once, and who waits is woken by what happens."""

from __future__ import annotations

import random
import threading
from collections import Counter
from typing import Any

import pytest
from tests.pool.kit import SOON, Threads, group, ledger, prompts, until_blocked

from headrace import Step
from headrace.pool.errors import PoolClosed

WRITERS, GROUPS, ROLLOUTS, TURNS = 8, 12, 2, 2


def write(pool: Any, writer: int) -> None:
    """A writer's groups in small submits, shuffled within each group, some of them sent twice."""
    chance = random.Random(writer)
    for i in range(GROUPS):
        steps = group(f"w{writer}/g{i}", ROLLOUTS, TURNS)
        chance.shuffle(steps)
        for some in (steps[:2], steps[2:], steps[:1] if chance.random() < 0.3 else []):
            pool.submit_steps(some)


def train(pool: Any, trainer: int, taken: list[Step], lock: threading.Lock) -> None:
    """Fetches under leases until the end; now and then it loses its batch instead of using it."""
    chance = random.Random(100 + trainer)
    while (batch := pool.fetch_batch(2, lease_s=600)) is not None:
        if chance.random() < 0.25:
            batch.nack()
            continue
        with lock:
            taken.extend(batch.steps)
        batch.ack()


def test_two_trainers_and_eight_writers_hand_over_every_step_exactly_once(pool: Any, threads: Threads) -> None:
    pool.configure(n_rollouts=ROLLOUTS)
    taken: list[Step] = []
    lock = threading.Lock()
    trainers = [threads.submit(train, pool, i, taken, lock) for i in range(2)]
    for writer in [threads.submit(write, pool, i) for i in range(WRITERS)]:
        writer.result(SOON)
    pool.shutdown()
    for trainer in trainers:
        trainer.result(SOON)
    # A trainer may have given back its batch after the other had gone: the rest is still there.
    train(pool, 2, taken, lock)
    counts = Counter((found.trajectory_uid, found.step_index) for found in taken)
    expected = {
        (f"w{w}/g{g}/{r}", turn)
        for w in range(WRITERS)
        for g in range(GROUPS)
        for r in range(ROLLOUTS)
        for turn in range(TURNS)
    }
    assert set(counts) == expected
    assert set(counts.values()) == {1}
    assert ledger(pool) == {"submitted": len(expected), "consumed": len(expected)}


def test_of_many_who_wait_each_gets_a_group_of_its_own(pool: Any, threads: Threads) -> None:
    waiting = [threads.submit(pool.fetch_batch, 1) for _ in range(6)]
    until_blocked(pool, 6)
    pool.submit_steps([one for i in range(6) for one in group(f"p{i}")])
    assert sorted(prompts(one.result(SOON))[0] for one in waiting) == [f"p{i}" for i in range(6)]


def test_the_same_step_from_many_writers_is_taken_once(pool: Any, threads: Threads) -> None:
    receipts = [one.result(SOON) for one in [threads.submit(pool.submit_steps, group("p")) for _ in range(8)]]
    assert sum(receipt.accepted for receipt in receipts) == 1
    assert sum(receipt.duplicates for receipt in receipts) == 7
    assert ledger(pool) == {"submitted": 1, "queued": 1}


def test_the_same_request_from_many_threads_is_one_hand_out(pool: Any, threads: Threads) -> None:
    pool.submit_steps([*group("a"), *group("b")])
    asked = [threads.submit(pool.fetch_batch, 1, request_id="r", timeout=SOON) for _ in range(6)]
    batches = [one.result(SOON) for one in asked]
    assert {prompts(batch)[0] for batch in batches} == {"a"}
    assert ledger(pool) == {"submitted": 2, "consumed": 1, "queued": 1}


def test_writers_who_wait_for_room_are_told_when_the_channel_ends(pool: Any, threads: Threads) -> None:
    pool.configure(max_queue_size=1, overflow="block")
    pool.submit_steps(group("a"))
    waiting = threads.submit(pool.submit_steps, group("b"))
    until_blocked(pool)
    pool.shutdown()
    with pytest.raises(PoolClosed, match="nothing was taken"):
        waiting.result(SOON)
