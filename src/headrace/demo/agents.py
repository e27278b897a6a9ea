"""The agents' process: many games at once against a gateway's address, until SIGTERM.

    python -m headrace.demo.agents --address http://127.0.0.1:8100 --run FOLDER

A group's uid follows from the seed and its number, and so does what it hides. A game that cannot be played to its end
(a server went away for good) is given up and counted; nothing that a server does ends this process. One game of every
group is written down, to be shown.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import uvloop

from headrace.demo import counters, games
from headrace.demo.agent import Agent
from headrace.demo.http import Connection, Failed, Refused
from headrace.demo.supply import Supply
from headrace.demo.tasks import TASKS

#: Groups that are set aside at once: so often the file is written before one of them begins.
RESERVE = 56
WRITE_S = 0.25


class Agents:
    """All of them, in one loop."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._address: str = given.address.rstrip("/")
        self._task = TASKS[given.task]
        self._seed: int = given.seed
        self._run: Path = given.run
        self._at_once: int = given.at_once
        self.counters = counters.read(self._run)
        self._asking = Connection(self._address)
        self._supply = Supply(self.counters.reserved, given.rollouts, given.ahead, self._waiting)
        self._agents = [Agent(self._address) for _ in range(self._at_once)]
        self._before = (self.counters.calls, self.counters.retries)

    async def run(self) -> None:
        """Plays until it is cancelled."""
        with (self._run / games.FILE).open("ab") as shown:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._write_down())
                    for agent in self._agents:
                        group.create_task(self._play(agent, shown))
            finally:
                self._write()

    async def _play(self, agent: Agent, shown: IO[bytes]) -> None:
        while True:
            number, rollout = await self._supply.take()
            if number >= self.counters.reserved:
                self.counters.reserved = number + RESERVE - number % RESERVE
                self._write()
            game = self._task.game(self._seed, number)
            group, uid = games.group_uid(self._seed, number), games.trajectory_uid(self._seed, number, rollout)
            try:
                await agent.play(game, f"/{uid}/{group}")
            except (Failed, Refused) as error:
                self.counters.given_up += 1
                print(f"gave up game {rollout} of group {group}: {error}", flush=True)
                self._supply.ended(number, kept=False)
                continue
            self._supply.ended(number, kept=True)
            self.counters.games += 1
            self.counters.wins += game.reward == 1.0
            if rollout == 0:
                games.append(shown, games.Game(number, game.hidden, game.messages, game.reward or 0.0))

    async def _waiting(self) -> int:
        """Groups that are ready and not taken yet. A pool that does not answer takes none."""
        try:
            stats = await self._asking.get("/pool/stats?channel=train")
        except (Failed, Refused):
            await asyncio.sleep(WRITE_S)
            return self._at_once
        return int(stats["groups"]["ready"])

    async def _write_down(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            self._write()

    def _write(self) -> None:
        self.counters.calls = self._before[0] + sum(agent.calls for agent in self._agents)
        self.counters.retries = self._before[1] + sum(agent.retries for agent in self._agents)
        counters.write(self._run, self.counters)


async def _until_told(agents: Agents) -> None:
    playing = asyncio.ensure_future(agents.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, playing.cancel)
    try:
        await playing
    except asyncio.CancelledError:
        pass


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m headrace.demo.agents", description="Play until SIGTERM.")
    found.add_argument("--address", required=True, help="the gateway's")
    found.add_argument("--run", required=True, type=Path, help="folder for the counters and the games to be shown")
    found.add_argument("--task", default="number", choices=TASKS)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--rollouts", type=int, default=8, help="games of a group")
    found.add_argument("--ahead", type=int, default=28, help="groups that may be open or wait for the trainer")
    found.add_argument("--at-once", type=int, default=128, help="games that are played at once")
    return found


def main(args: Sequence[str] | None = None) -> None:
    uvloop.run(_until_told(Agents(parser().parse_args(args))))


if __name__ == "__main__":
    main()
