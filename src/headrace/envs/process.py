"""Rollouts without a trainer: so many groups into a file, several at a time, and a page to read them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.envs.page import write_page
from headrace.envs.rollouts import RolloutFailed
from headrace.envs.stop import Stop
from headrace.envs.types import Item

if TYPE_CHECKING:
    from headrace.envs.base import BaseEnv

log = logging.getLogger("headrace.envs")

#: Items in a row that may fail: after so many, the next would too.
MOST_FAILURES = 16
#: Items for each worker, rolled out or waiting to be written, at which no more are begun.
WAITING = 4
#: What a failure to write the file of groups is counted as.
FILE = "data_path_to_save_groups"


class Processing:
    """Makes `groups` groups. No item is begun that could make one too many; one that comes to nothing is replaced.

    As many items as there are workers are rolled out at a time. What an item came to is written beside the next ones'
    rollouts, one item after the other.
    """

    def __init__(self, env: BaseEnv, groups: int) -> None:
        self._env, self._groups = env, groups
        self._running: set[asyncio.Task[bool]] = set()
        self._rolling = 0
        self._failures = 0
        self._why = ""
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self.stop = Stop()
        self.done = 0

    async def run(self) -> None:
        """Until all groups are made, items end, or a stop is asked for: what is under way is then finished."""
        asked = asyncio.create_task(self.stop.asked.wait())
        asked.add_done_callback(lambda _: self._changed.set())
        with self.stop.on_signals():
            try:
                while await self._fill():
                    await self._change()
                await self.stop.or_done(self._finish(), self.stop.forced)
            finally:
                asked.cancel()
                for task in self._running:
                    task.cancel()
                await asyncio.gather(*self._running, return_exceptions=True)

    async def _fill(self) -> bool:
        """Begins as many items as may run; whether there is anything to wait for."""
        env = self._env
        most = min(self._groups - self.done, WAITING * env.max_num_workers)
        while self._rolling < env.max_num_workers and len(self._running) < most and not self.stop.asked.is_set():
            item = env.backlog.pop() if env.backlog else await self.stop.or_done(env.get_next_item())
            if item is None:
                break
            env.counts.items += 1
            self._rolling += 1
            task = asyncio.create_task(self._item(item))
            self._running.add(task)
            env.workers.add(task)
            task.add_done_callback(self._ended)
        return bool(self._running) and not self.stop.asked.is_set()

    def _ended(self, task: asyncio.Task[bool]) -> None:
        self._env.workers.discard(task)
        self._changed.set()

    async def _change(self) -> None:
        """Waits for what could change what is to be done, and takes note of it."""
        await self._changed.wait()
        self._changed.clear()
        for task in [task for task in self._running if task.done()]:
            self._running.discard(task)
            self.done += task.result()
        if self._failures >= MOST_FAILURES:
            raise HeadraceError(f"{self._failures} items in a row came to nothing, the last one with: {self._why}")

    async def _finish(self) -> None:
        while self._running:
            await self._change()

    async def _item(self, item: Item) -> bool:
        """Rolls an item out and writes what comes of it; whether that counts as a group."""
        env = self._env
        limit = env.config.worker_timeout
        found = None
        try:
            async with asyncio.timeout(limit if limit > 0 else None):
                found = await env.roll_out(item)
            self._failures = 0
        except TimeoutError as error:
            env.counts.fail("timeout", error)
            self._fail(f"nothing after worker_timeout, {limit:g} s")
        except RolloutFailed as error:
            self._fail(str(error))
        finally:
            self._rolling -= 1
            self._changed.set()
        if found:
            async with self._writing:
                await self._write(found, item)
        with env.counts.guard("cleanup"):
            await env.cleanup()
        return bool(found)

    def _fail(self, why: str) -> None:
        self._failures, self._why = self._failures + 1, why

    async def _write(self, found: Any, item: Item) -> None:
        env = self._env
        await env.handle_send_to_api(found, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False)
        if env.counts.failed[FILE]:  # beside a trainer a lost line is a pity; here the file is all there is
            raise HeadraceError(f"groups cannot be written: {env.counts.tracebacks[-1].splitlines()[-1]}")
        with env.counts.guard("wandb_log"):
            await env.wandb_log()
        env.curr_step += 1


async def process(env: BaseEnv, groups: int) -> None:
    """Everything that `process` does. What was written stays, and has its page, however it ends."""
    if groups < 0:
        raise InvalidInput(f"total_steps is {groups}: without a trainer it must say how many groups are made")
    await env.setup()
    await env.open_wandb()
    processing = Processing(env, groups)
    try:
        await processing.run()
        if processing.done < groups and not processing.stop.asked.is_set():
            log.info("there are no more items: %d of %d groups", processing.done, groups)
    finally:
        await env.close()
        if env.jsonl_writer is not None:
            with env.counts.guard("page"):
                await asyncio.to_thread(write_page, env.jsonl_writer.path, title=env.name)
