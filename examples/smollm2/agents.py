"""The agents: many conversations at once against a gateway's address. They know nothing of training.

    python examples/smollm2/agents.py --address http://127.0.0.1:8100 --run runs/smollm2            # until SIGTERM
    python examples/smollm2/agents.py --address http://127.0.0.1:8100 --run runs/smollm2 --validate # once

A problem is tried by a group of rollouts; each asks once, is paid, and ends. Groups that are open or wait for the
trainer are at most `--ahead`: with as many as a batch has, a batch is at most about one version old. A validation asks
every held-out problem once, at temperature 0, on a channel of its own, and adds a line to validation.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from problems import Problem, held_out, training

from headrace.demo.agents import GameSupply

#: Waits before an answer that did not come is asked for again; after the last, the rollout is given up.
PAUSES_S = (0.2, 1.0, 3.0)
#: Conversations of a validation that are kept, to be shown.
SHOWN = 40


@dataclass(slots=True)
class Reply:
    text: str
    whole: bool
    tokens: int
    version: int


@dataclass(slots=True)
class Totals:
    """What the agents have done so far; agents.json in the run's folder."""

    began: float = field(default_factory=time.time)
    rollouts: int = 0
    given_up: int = 0
    tokens: int = 0
    cut: int = 0
    right: int = 0
    seconds: float = 0.0


class Agents:
    def __init__(self, given: argparse.Namespace, session: aiohttp.ClientSession) -> None:
        self.given, self.session = given, session
        self.totals = Totals()
        self._held_out = held_out(given.problems)
        self._fresh = training(given.first, self._held_out)
        self._groups: dict[int, Problem] = {}
        self._supply = GameSupply(0, given.rollouts, given.ahead, self._waiting)
        self._life = f"p{given.first}-{int(time.time())}"  # uids of an earlier life stay its own

    async def train(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write_down())
            for _ in range(self.given.at_once):
                group.create_task(self._rollouts())

    async def _rollouts(self) -> None:
        while True:
            number, rollout = await self._supply.take()
            while number not in self._groups:
                self._groups[len(self._groups)] = next(self._fresh)
            try:
                await self._play(self._groups[number], f"/{self._life}-g{number}-r{rollout}/{self._life}-g{number}")
            except (aiohttp.ClientError, TimeoutError) as error:
                self.totals.given_up += 1
                print(f"gave up rollout {rollout} of group {number}: {error}", flush=True)
                self._supply.ended(number, kept=False)
            else:
                self._supply.ended(number, kept=True)

    async def _play(self, problem: Problem, base: str) -> None:
        reply = await self._ask(problem, base, temperature=1.0)
        reward = problem.reward(reply.text, whole=reply.whole)
        await self._post(f"{base}/v1/complete_trajectory", {"reward": reward})
        totals = self.totals
        totals.rollouts += 1
        totals.tokens += reply.tokens
        totals.cut += not reply.whole
        totals.right += reward == 1.0

    async def validate(self) -> dict[str, Any]:
        began, limit = time.time(), asyncio.Semaphore(self.given.at_once)

        async def one(number: int, problem: Problem) -> tuple[Reply, float]:
            base = f"/val-{began:.0f}-{number}/val-{number}-{began:.0f}"
            async with limit:
                await self._post(f"{base}/v1/register_trajectory", {"channel": "val", "n_rollouts": 1})
                reply = await self._ask(problem, base, temperature=0.0)
                reward = problem.reward(reply.text, whole=reply.whole)
                await self._post(f"{base}/v1/complete_trajectory", {"reward": reward})
                return reply, reward

        played = await asyncio.gather(*(one(number, problem) for number, problem in enumerate(self._held_out)))
        shown = [
            {"question": problem.question, "answer": problem.answer, "reply": reply.text, "reward": reward}
            for problem, (reply, reward) in list(zip(self._held_out, played, strict=True))[:SHOWN]
        ]
        return {
            "version": max(reply.version for reply, _ in played),
            "version_first": min(reply.version for reply, _ in played),
            "problems": len(played),
            "reward": sum(reward for _, reward in played) / len(played),
            "cut": sum(not reply.whole for reply, _ in played) / len(played),
            "tokens": sum(reply.tokens for reply, _ in played) / len(played),
            "seconds": time.time() - began,
            "at": time.time(),
            "shown": shown,
        }

    async def _ask(self, problem: Problem, base: str, *, temperature: float) -> Reply:
        body = {
            "model": "policy",
            "messages": [{"role": "user", "content": problem.question}],
            "temperature": temperature,
            "max_tokens": self.given.max_tokens,
        }
        answer, headers = await self._post(f"{base}/v1/chat/completions", body)
        choice = answer["choices"][0]
        return Reply(
            choice["message"]["content"] or "",
            choice["finish_reason"] == "stop",
            answer["usage"]["completion_tokens"],
            int(headers.get("x-headrace-policy-version") or 0),
        )

    async def _post(self, path: str, body: Any) -> tuple[Any, Any]:
        for pause in (*PAUSES_S, None):
            try:
                async with self.session.post(path, json=body) as response:
                    response.raise_for_status()
                    return await response.json(), response.headers
            except (aiohttp.ClientError, TimeoutError) as error:
                refused = isinstance(error, aiohttp.ClientResponseError) and error.status < 500 and error.status != 429
                if pause is None or refused:
                    raise
                await asyncio.sleep(pause)
        raise AssertionError  # the last pause is None

    async def _waiting(self) -> int:
        """Groups that are ready and not taken yet."""
        try:
            async with self.session.get("/pool/stats", params={"channel": "train"}) as response:
                response.raise_for_status()
                return int((await response.json())["groups"]["ready"])
        except (aiohttp.ClientError, TimeoutError):
            await asyncio.sleep(PAUSES_S[0])
            return int(self.given.ahead)  # a pool that does not answer takes none

    async def _write_down(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.totals.seconds = time.time() - self.totals.began
            (self.given.run / "agents.json").write_text(json.dumps(asdict(self.totals)))


async def run(given: argparse.Namespace) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=given.timeout_s)
    async with aiohttp.ClientSession(given.address, connector=connector, timeout=timeout) as session:
        agents = Agents(given, session)
        if given.validate:
            row = await agents.validate()
            with (given.run / "validation.jsonl").open("a") as rows:
                rows.write(json.dumps(row) + "\n")
            print(f"version {row['version']}: {row['reward']:.3f} of {row['problems']} held-out problems", flush=True)
            return
        working = asyncio.ensure_future(agents.train())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, working.cancel)
        try:
            await working
        except asyncio.CancelledError:
            pass


def main() -> None:
    given = argparse.ArgumentParser(description="Play until SIGTERM, or validate once.")
    given.add_argument("--address", required=True, help="the gateway's")
    given.add_argument("--run", required=True, type=Path, help="folder for agents.json and validation.jsonl")
    given.add_argument("--validate", action="store_true", help="ask the held-out problems once, and end")
    given.add_argument("--problems", type=int, default=400, help="held-out problems")
    given.add_argument("--rollouts", type=int, default=16, help="rollouts of a group")
    given.add_argument("--ahead", type=int, default=32, help="groups that may be open or wait for the trainer")
    given.add_argument("--at-once", type=int, default=512, help="rollouts that run at once")
    given.add_argument("--max-tokens", type=int, default=64, help="of a reply")
    given.add_argument("--timeout-s", type=float, default=300, help="longest wait for a reply")
    given.add_argument("--first", type=int, default=0, help="the training problem to begin with")
    asyncio.run(run(given.parse_args()))


if __name__ == "__main__":
    main()
