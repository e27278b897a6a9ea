"""The agents' process: many games at once against a gateway's address, until SIGTERM.

    python -m headrace.demo.agents --address http://127.0.0.1:8100 --run FOLDER

An agent is a plain multi-turn client of `/v1/chat/completions` that knows a `base_url` and nothing else: messages go
out, a reply comes back, and when the game is over its reward is told. A group's uid follows from the seed and its
number, and so does what it hides. A game that cannot be played to its end (a server went away for good) is given up and
counted; nothing that a server does ends this process. One game of every group is written down, to be shown.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import orjson
import uvloop

from headrace.demo import games
from headrace.demo.tasks import TASKS, NumberGame

#: A kept connection that was idle for longer may be closed by the server in the moment that it is used.
KEEP_ALIVE_S = 4.0


class TryAgain(Exception):
    """No answer, or one that asks to retry (429, 5xx)."""


class GameRefused(Exception):
    """An error answer that a retry would not change."""


class GatewayConnection:
    """A bare HTTP/1.1 client: one kept connection, one JSON request at a time. It connects when it is first used, and
    again after a failure.

    An agent is usually an SDK's client, which spends milliseconds on a call. Hundreds of agents that share two cores
    with everything else need one that does not: aiohttp takes four times the CPU of this one.
    """

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._head = f" HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: "
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used = 0.0

    async def post(self, path: str, value: Any) -> Any:
        """Posts a JSON value; returns the answer's JSON. Raises `TryAgain` or `GameRefused`."""
        return await self._ask("POST", path, orjson.dumps(value))

    async def get(self, path: str) -> Any:
        """Like `post`, with GET."""
        return await self._ask("GET", path, b"")

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, method: str, path: str, body: bytes) -> Any:
        try:
            status, data = await self._exchange(f"{method} {path}{self._head}{len(body)}\r\n\r\n".encode() + body)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise TryAgain(f"{path}: {str(error) or type(error).__name__}") from error
        except BaseException:
            self.close()  # an answer may still be on its way: nobody else must read it
            raise
        if status == 200:
            return orjson.loads(data)
        said = f"{path} was answered {status}: {data[:300].decode(errors='replace')}"
        raise TryAgain(said) if status >= 500 or status == 429 else GameRefused(said)

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        if self._streams is None or loop.time() - self._used > KEEP_ALIVE_S:
            self.close()
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        at = head.index(b"content-length:") + len(b"content-length:")
        data = await reader.readexactly(int(head[at : head.index(b"\r\n", at)]))
        self._used = loop.time()
        return int(head[9:12]), data


#: Waits before an answer that did not come is asked for again; after the last, the game is given up.
RETRY_DELAYS_S = (0.1, 0.3, 1.0, 2.0, 4.0)


class Agent:
    """Plays one game after another; `calls` and `retries` count its requests."""

    def __init__(self, address: str) -> None:
        self._connection = GatewayConnection(address)
        self.calls = 0
        self.retries = 0

    async def play(self, game: NumberGame, base_path: str) -> None:
        """Plays a game to its end; `base_path` is the path of its base URL. Raises `TryAgain` after the last retry."""
        while game.reward is None:
            answer = await self._patiently(
                self._connection.post,
                f"{base_path}/v1/chat/completions",
                {
                    "model": "policy",
                    "messages": game.messages,
                    "temperature": 1.0,
                    "max_tokens": game.task.max_tokens,
                },
            )
            self.calls += 1
            game.reply(answer["choices"][0]["message"]["content"] or "")
        await self._patiently(self._connection.post, f"{base_path}/v1/complete_trajectory", {"reward": game.reward})

    def close(self) -> None:
        self._connection.close()

    async def _patiently(self, ask: Callable[[str, Any], Awaitable[Any]], path: str, body: Any) -> Any:
        for pause in RETRY_DELAYS_S:
            try:
                return await ask(path, body)
            except TryAgain:
                self.retries += 1
                await asyncio.sleep(pause)
        return await ask(path, body)


#: Seconds between two questions while nothing may be opened.
POOL_POLL_S = 0.02


@dataclass(slots=True)
class OpenGames:
    """A group with games to begin or under way."""

    left: int
    whole: bool = True


class GameSupply:
    """Hands out games as (group, rollout): never more than the trainer is about to want.

    A group is open from its first game until its last one ended; then it waits in the pool until the trainer takes it.
    Open and waiting groups together are at most `ahead`: with as many as a batch has, the next batch is played while
    the trainer learns from the last one, and no batch is more than one version old. What waits is asked of the pool,
    and only when that would decide whether a group may be opened.
    """

    def __init__(self, first: int, rollouts: int, ahead: int, waiting: Callable[[], Awaitable[int]]) -> None:
        """`waiting` returns how many groups are ready in the pool and not yet taken."""
        self.next = first
        self._rollouts = rollouts
        self._ahead = ahead
        self._ask = waiting
        self._waiting = ahead  # not known yet
        self._open: dict[int, OpenGames] = {}
        self._games: deque[tuple[int, int]] = deque()
        self._turn = asyncio.Lock()

    async def take(self) -> tuple[int, int]:
        """The next game, waited for until it may begin."""
        async with self._turn:
            while not self._games:
                if len(self._open) + self._waiting < self._ahead:
                    self._begin()
                    break
                self._waiting = await self._ask()
                if len(self._open) + self._waiting >= self._ahead:
                    await asyncio.sleep(POOL_POLL_S)
            return self._games.popleft()

    def ended(self, group: int, *, kept: bool) -> None:
        """Notes that a game is over; a group with one that was given up will never be ready."""
        found = self._open[group]
        found.left -= 1
        found.whole &= kept
        if not found.left:
            del self._open[group]
            self._waiting += found.whole

    def _begin(self) -> None:
        group, self.next = self.next, self.next + 1
        self._open[group] = OpenGames(self._rollouts)
        self._games.extend((group, rollout) for rollout in range(self._rollouts))


#: Groups that are set aside at once: so often the file is written before one of them begins.
RESERVED_GROUPS = 56
COUNTERS_WRITE_S = 0.25


class Agents:
    """All agents of the process, in one event loop."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._address: str = given.address.rstrip("/")
        self._task = TASKS[given.task]
        self._seed: int = given.seed
        self._run: Path = given.run
        self._at_once: int = given.at_once
        self.counters = games.read_counters(self._run)
        self._asking = GatewayConnection(self._address)
        self._supply = GameSupply(self.counters.reserved, given.rollouts, given.ahead, self._waiting)
        self._agents = [Agent(self._address) for _ in range(self._at_once)]
        self._before = (self.counters.calls, self.counters.retries)

    async def run(self) -> None:
        """Plays until it is cancelled."""
        with (self._run / games.GAMES_FILE).open("ab") as shown:
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
                self.counters.reserved = number + RESERVED_GROUPS - number % RESERVED_GROUPS
                self._write()
            game = self._task.game(self._seed, number)
            group, uid = games.group_uid(self._seed, number), games.trajectory_uid(self._seed, number, rollout)
            try:
                await agent.play(game, f"/{uid}/{group}")
            except (TryAgain, GameRefused) as error:
                self.counters.given_up += 1
                print(f"gave up game {rollout} of group {group}: {error}", flush=True)
                self._supply.ended(number, kept=False)
                continue
            self._supply.ended(number, kept=True)
            self.counters.games += 1
            self.counters.wins += game.reward == 1.0
            if rollout == 0:
                games.append_game(shown, games.Game(number, game.hidden, game.messages, game.reward or 0.0))

    async def _waiting(self) -> int:
        """The number of ready groups not yet taken; as many as there are agents where the pool does not answer, so that
        none is opened."""
        try:
            stats = await self._asking.get("/pool/stats?channel=train")
        except (TryAgain, GameRefused):
            await asyncio.sleep(COUNTERS_WRITE_S)
            return self._at_once
        return int(stats["groups"]["ready"])

    async def _write_down(self) -> None:
        while True:
            await asyncio.sleep(COUNTERS_WRITE_S)
            self._write()

    def _write(self) -> None:
        self.counters.calls = self._before[0] + sum(agent.calls for agent in self._agents)
        self.counters.retries = self._before[1] + sum(agent.retries for agent in self._agents)
        games.write_counters(self._run, self.counters)


async def _until_told(agents: Agents) -> None:
    playing = asyncio.ensure_future(agents.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, playing.cancel)
    try:
        await playing
    except asyncio.CancelledError:
        pass


def parser() -> argparse.ArgumentParser:
    """The command line of the agents' process."""
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
