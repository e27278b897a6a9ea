"""What one worker changes is read anew by the others, though nobody tells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import DataPool
from headrace.gateway.errors import Refusal
from headrace.gateway.sessions import Session, Sessions
from headrace.gateway.stamps import SessionStamps


async def flushed(uid: str) -> None:
    """Everything is in the pool."""


def worker(pool: DataPool, path: Path) -> Sessions:
    """The sessions of a process that maps the table at `path`."""
    found = Sessions(pool.aio, flushed, most_tokens=1_000, open_unknown=False)
    found.stamps = SessionStamps(path)
    return found


async def test_a_session_that_another_worker_ended_is_read_again(tmp_path: Path) -> None:
    table = tmp_path / "stamps"
    SessionStamps.create(table)
    with DataPool() as pool:
        one, other = worker(pool, table), worker(pool, table)
        await pool.aio.open("t", "p", "train")
        await pool.aio.open("u", "p", "train")
        held = await one.running("t", "p", "train", begin=True)
        untouched = await one.running("u", "p", "train", begin=True)
        assert await one.running("t", "p", "train", begin=True) is held, "nothing has changed"
        await pool.aio.complete("t", 1.0)
        assert other.stamps is not None
        other.stamps.change("t")
        with pytest.raises(Refusal) as found:
            await one.running("t", "p", "train", begin=True)
        assert found.value.status == 409
        assert await one.running("u", "p", "train", begin=True) is untouched


async def test_sessions_that_other_workers_ended_are_forgotten_though_nobody_asks_for_them(tmp_path: Path) -> None:
    table = tmp_path / "stamps"
    SessionStamps.create(table)
    other = SessionStamps(table)
    with DataPool() as pool:
        one = worker(pool, table)
        live = [one.add(Session(f"live-{n}", "p", "train")) for n in range(10)]
        used = one.add(Session("used", "p", "train"))
        other.change("used")
        with one.using(used):
            for n in range(1_000):
                one.add(Session(f"ended-{n}", "p", "train"))
                other.change(f"ended-{n}")
            assert len(one) <= 3 * (len(live) + 1)
            assert one.add(Session("used", "p", "train")) is used, "a call is under way in it"
        assert [await one.find(session.uid) for session in live] == live


def test_changes_of_several_processes_add_up(tmp_path: Path) -> None:
    SessionStamps.create(tmp_path / "stamps")
    one, other = (SessionStamps(tmp_path / "stamps") for _ in range(2))
    one.change("t")
    other.change("t")
    assert (one.of("t"), other.of("t"), one.of("u")) == (2, 2, 0)
