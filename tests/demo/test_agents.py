"""The agents' process against a gateway that a test plays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from tests.site import Site

from headrace.demo import agents, games
from headrace.demo.agents import Agents
from headrace.demo.games import first_games
from headrace.demo.tasks import TASKS


class Gateway:
    """Answers every call with binary search's first guess; a trainer that takes what it is told to."""

    def __init__(self) -> None:
        self.address = ""
        self.completed: dict[str, list[tuple[str, float]]] = {}
        self.calls: Counter[str] = Counter()
        self.taken = 0
        #: What is wrong with the next answers.
        self.statuses: list[int] = []

    async def chat(self, request: web.Request) -> web.Response:
        if self.statuses:
            return web.json_response({"error": {}}, status=self.statuses.pop())
        self.calls[request.match_info["uid"]] += 1
        asked = await request.json()
        assert asked["temperature"] == 1.0
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "4"}}]})

    async def complete(self, request: web.Request) -> web.Response:
        done = self.completed.setdefault(request.match_info["group"], [])
        done.append((request.match_info["uid"], (await request.json())["reward"]))
        return web.json_response({"status": "ok"})

    async def stats(self, request: web.Request) -> web.Response:
        return web.json_response({"groups": {"ready": self.whole() - self.taken}})

    def whole(self) -> int:
        return sum(len(games) == 8 for games in self.completed.values())


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    found = Gateway()
    site = Site(
        web.post("/{uid}/{group}/v1/chat/completions", found.chat),
        web.post("/{uid}/{group}/v1/complete_trajectory", found.complete),
        web.get("/pool/stats", found.stats),
    )
    found.address = f"http://127.0.0.1:{await site.start()}"
    yield found
    await site.end()


class Playing:
    """The agents at work, until `end`."""

    def __init__(self, gateway: Gateway, run: Path) -> None:
        given = {"address": gateway.address, "run": run, "task": "number", "seed": 1, "ahead": 2, "at-once": 16}
        self.agents = Agents(agents.parser().parse_args([f"--{name}={value}" for name, value in given.items()]))
        self.task = asyncio.ensure_future(self.agents.run())

    async def until_games(self, games: int) -> None:
        """Waits until so many are over and the agents know it."""
        while self.agents.counters.games + self.agents.counters.given_up < games:
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


async def test_every_game_is_played_to_its_end_and_told(gateway: Gateway, tmp_path: Path) -> None:
    playing = Playing(gateway, tmp_path)
    await playing.until_games(16)
    await playing.end()
    for group, played in gateway.completed.items():
        hidden = TASKS["number"].game(1, int(group.removeprefix("s1-g"))).hidden
        assert sorted(played) == [(f"{group}-r{n}", float(hidden == 4)) for n in range(8)]
        assert {gateway.calls[uid] for uid, _ in played} == {1 if hidden == 4 else 3}


async def test_agents_stay_one_batch_ahead(gateway: Gateway, tmp_path: Path) -> None:
    playing = Playing(gateway, tmp_path)
    await playing.until_games(16)
    assert set(gateway.completed) == {"s1-g0", "s1-g1"}
    gateway.taken = 2
    await playing.until_games(32)
    await playing.end()
    assert set(gateway.completed) == {"s1-g0", "s1-g1", "s1-g2", "s1-g3"}


async def test_a_call_that_failed_is_made_again(gateway: Gateway, tmp_path: Path) -> None:
    gateway.statuses = [503, 503]
    playing = Playing(gateway, tmp_path)
    await playing.until_games(16)
    await playing.end()
    found = games.read_counters(tmp_path)
    assert (found.games, found.retries, found.given_up) == (16, 2, 0)


async def test_a_game_that_is_refused_is_given_up_and_counted(gateway: Gateway, tmp_path: Path) -> None:
    gateway.statuses = [409]
    playing = Playing(gateway, tmp_path)
    await playing.until_games(16)
    await playing.end()
    assert games.read_counters(tmp_path).given_up == 1


async def test_counters_go_on_and_no_uid_is_used_twice_after_a_restart(gateway: Gateway, tmp_path: Path) -> None:
    for groups in (2, 4):
        playing = Playing(gateway, tmp_path)
        await playing.until_games(8 * groups)
        await playing.end()
        gateway.taken = groups
    found = games.read_counters(tmp_path)
    assert found.games == 32
    assert found.calls == gateway.calls.total()
    assert all(len(games) == 8 for games in gateway.completed.values())
    assert len(gateway.completed) == 4


async def test_one_game_of_each_group_is_written_down(gateway: Gateway, tmp_path: Path) -> None:
    playing = Playing(gateway, tmp_path)
    await playing.until_games(16)
    await playing.end()
    shown = first_games(tmp_path, 10)
    assert sorted(game.group for game in shown) == [0, 1]
    assert all(game.messages[0] == {"role": "user", "content": "guess"} for game in shown)
