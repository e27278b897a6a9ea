"""Agents stay as far ahead of the trainer as they may, and no further."""

from __future__ import annotations

import asyncio

import pytest

from headrace.demo.agents import GameSupply


class Pool:
    """How many groups are ready; `asked` is set when somebody wants to know."""

    def __init__(self) -> None:
        self.ready = 0
        self.asked = asyncio.Event()

    async def waiting(self) -> int:
        self.asked.set()
        return self.ready


@pytest.fixture
def pool() -> Pool:
    return Pool()


async def test_games_come_group_by_group(pool: Pool) -> None:
    supply = GameSupply(5, rollouts=2, ahead=2, waiting=pool.waiting)
    assert [await supply.take() for _ in range(4)] == [(5, 0), (5, 1), (6, 0), (6, 1)]


async def test_no_group_begins_while_a_batch_is_open_or_waits(pool: Pool) -> None:
    supply = GameSupply(0, rollouts=1, ahead=2, waiting=pool.waiting)
    await supply.take()
    await supply.take()
    supply.ended(0, kept=True)
    pool.ready = 1
    pool.asked.clear()
    third = asyncio.ensure_future(supply.take())
    await pool.asked.wait()
    assert not third.done()
    pool.ready = 0  # the trainer has taken it
    assert await third == (2, 0)


async def test_what_waits_from_an_earlier_run_counts(pool: Pool) -> None:
    pool.ready = 2
    supply = GameSupply(0, rollouts=1, ahead=2, waiting=pool.waiting)
    first = asyncio.ensure_future(supply.take())
    await pool.asked.wait()
    assert not first.done()
    pool.ready = 1
    assert await first == (0, 0)


async def test_a_group_with_a_game_given_up_makes_room_and_never_waits(pool: Pool) -> None:
    supply = GameSupply(0, rollouts=2, ahead=1, waiting=pool.waiting)
    await supply.take()
    await supply.take()
    supply.ended(0, kept=False)
    supply.ended(0, kept=True)
    pool.asked.clear()
    assert await supply.take() == (1, 0)
    assert not pool.asked.is_set()
