"""A rollouter in this process, on a real gateway, with flows whose turns a test writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.gateway.kit import Running

from headrace.flows.flow import AgentFailed
from headrace.flows.gateway_client import PATIENCE_S, GatewayClient, Handle
from headrace.flows.rollout_state import RolloutStateFile
from headrace.flows.rollouter import AsyncRollouter, RolloutSummary
from headrace.flows.schedule import RolloutSchedule
from headrace.flows.schedule_state import RolloutRules
from headrace.flows.task import Task
from headrace.flows.turns import SingleTurnFlow

Before = Callable[[Task], Awaitable[None]]


def rows(count: int, kind: str = "q") -> list[dict[str, Any]]:
    return [{"question": f"{kind} {at}", "data_source": kind, "ground_truth": str(at)} for at in range(count)]


class OneTurn(SingleTurnFlow):
    """One short answer, after what the test does before it."""

    def __init__(self, gateway: GatewayClient, before: Before | None = None, reward: float | None = 1.0) -> None:
        super().__init__(gateway, sampling={"max_tokens": 2, "temperature": 1.0})
        self.before, self.reward = before, reward
        self.seen: list[Task] = []

    async def play(self, task: Task, handle: Handle) -> float | None:
        self.seen.append(task)
        if self.before is not None:
            await self.before(task)
        await super().play(task, handle)
        return self.reward


class Run:
    """One rollouter over a gateway. `finish` plays to the end; `started` plays beside a test in a thread."""

    def __init__(
        self,
        gateway: Running,
        rules: RolloutRules,
        *,
        before: Before | None = None,
        state: Path | None = None,
        reward: float | None = 1.0,
        key: str | None = None,
        patience_s: float = PATIENCE_S,
        data: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        **options: Any,
    ) -> None:
        self.address, self.rules, self.before, self.state = gateway.address, rules, before, state
        self.reward, self.key, self.patience_s = reward, key, patience_s
        self.options = {"poll_s": 0.02, **options}
        self.data = data or {"train": rows(rules.rows), "val": rows(rules.val_rows, "v")}
        self.said: list[str] = []
        self.seen: list[Task] = []
        self.rollouter: AsyncRollouter | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def finish(self) -> RolloutSummary:
        return asyncio.run(self.play())

    def started(self) -> Beside:
        return Beside(self)

    async def play(self) -> RolloutSummary:
        client = GatewayClient(self.address, self.key, patience_s=self.patience_s)
        flow = OneTurn(client, self.before, self.reward)
        self.seen = flow.seen
        try:
            with RolloutStateFile(self.state) as file:
                schedule = RolloutSchedule(self.rules, file.load(self.rules.rows, self.rules.val_rows))
                self.rollouter = AsyncRollouter(
                    schedule, flow, self.data, client, file, say=self.said.append, **self.options
                )
                self.loop = asyncio.get_running_loop()
                return await self.rollouter.run(lambda: self.said.append("ready"))
        finally:
            await flow.aclose()
            await client.aclose()


class Beside:
    """A run in a thread of its own, while the block lasts; `summary` is there once it has ended."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.summary: RolloutSummary | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._play, daemon=True)

    def _play(self) -> None:
        try:
            self.summary = self.run.finish()
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.stop()
        self.join()

    def call(self, name: str) -> None:
        """Has the rollouter do something (`stop`, `pause`), in its own thread."""
        rollouter, loop = self.run.rollouter, self.run.loop
        assert rollouter is not None
        assert loop is not None
        with suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(getattr(rollouter, name))

    def stop(self) -> None:
        self.call("stop")

    def join(self) -> RolloutSummary | None:
        self._thread.join(300)
        assert not self._thread.is_alive(), "the rollouter did not end"
        if self.error is not None:
            raise self.error
        return self.summary


def failing(reason: str = "crashed") -> AgentFailed:
    return AgentFailed(reason, "as the test wants it")
