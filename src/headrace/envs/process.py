"""Runs without a trainer: `process` makes a number of groups, as a file and a page; `evaluate` evaluates once."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.envs.core import EnvCore
from headrace.envs.files import write_page
from headrace.envs.groups import RolloutFailed
from headrace.envs.metrics import REASONS
from headrace.envs.stop import StopRequest, wait_for_items
from headrace.envs.types import Item
from headrace.metrics import flat

log = logging.getLogger("headrace.envs")

#: Items per worker, being rolled out or waiting to be written, at which no more are started: bounds the memory.
MAX_ITEMS_PER_WORKER = 4
#: What a failure to write the file of groups is counted as.
FILE_FAILURE = "data_path_to_save_groups"


class Processing:
    """Makes `groups` groups. No item is started that could make one too many; one that fails is replaced.

    As many items as there are workers are rolled out at a time. Groups are written while the next items are rolled
    out, one item after the other.
    """

    def __init__(self, env: EnvCore, groups: int) -> None:
        self._env, self._groups = env, groups
        self._running: set[asyncio.Task[bool]] = set()
        self._rolling = 0
        self._changed = asyncio.Event()
        self._writing = asyncio.Lock()
        self.stop = StopRequest()
        self.done = 0

    async def run(self) -> None:
        """Returns once all groups are made, items have run out, or a stop was asked for and work in flight ended."""
        asked = asyncio.create_task(self.stop.asked.wait())
        asked.add_done_callback(lambda _: self._changed.set())
        with self.stop.on_signals():
            try:
                await self.stop.or_done(self._begin())
                while await self._fill():
                    await self._change()
                await self.stop.or_done(self._finish(), self.stop.forced)
            finally:
                asked.cancel()
                for task in self._running:
                    task.cancel()
                await asyncio.gather(*self._running, return_exceptions=True)

    async def _begin(self) -> None:
        await self._env.preflight()
        await self._env.setup()
        await self._env.open_wandb()

    async def _fill(self) -> bool:
        """Starts as many items as may run; whether there is anything to wait for."""
        env = self._env
        most = min(self._groups - self.done, MAX_ITEMS_PER_WORKER * env.max_num_workers)
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
        """Waits for an item's end or a stop, and counts finished items. Raises `GaveUp` after too many failures."""
        await self._changed.wait()
        self._changed.clear()
        for task in [task for task in self._running if task.done()]:
            self._running.discard(task)
            self.done += task.result()
        self._env.counts.give_up_after(self._env.max_failures)

    async def _finish(self) -> None:
        if self._running and self.stop.asked.is_set() and not self.stop.forced.is_set():
            log.info("%d items are finished before the end; stop again to break them off", len(self._running))
        await wait_for_items(self._running, self._env.server)
        for task in self._running:
            if task.done():
                self.done += task.result()

    async def _item(self, item: Item) -> bool:
        """Rolls an item out and writes its groups; whether it counts as a group made."""
        env = self._env
        limit = env.config.worker_timeout
        found = None
        try:
            async with asyncio.timeout(limit if limit > 0 else None):
                found = await env.roll_out(item)
            if not found:
                env.counts.item_failed("collect_trajectories or postprocess_histories gave None, no group")
        except TimeoutError as error:
            env.counts.fail("timeout", error)
            env.counts.item_failed(f"nothing after worker_timeout, {limit:g} s")
        except RolloutFailed:
            pass  # counted and told where it failed
        finally:
            self._rolling -= 1
            self._changed.set()
        written = False
        if found:
            async with self._writing:
                written = await self._write(found, item)
        with env.counts.guard("cleanup"):
            await env.cleanup()
        return written

    async def _write(self, found: Any, item: Item) -> bool:
        """Writes an item's groups; whether any was fit to be written."""
        env = self._env
        groups, skipped, in_a_row = env.counts.groups, Counter(env.counts.skipped), env.counts.failures_in_a_row
        await env.handle_send_to_api(found, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False)
        left_out = env.counts.skipped - skipped
        if left_out and env.counts.groups == groups:
            if "rubbish" not in left_out:  # which is counted already; other groups are valid, but not in the file
                env.counts.failures_in_a_row = in_a_row
                env.counts.item_failed(f"a group that is left out: {REASONS[next(iter(left_out))]}")
            return False
        env.counts.item_succeeded()
        if env.counts.failed[FILE_FAILURE]:  # without a trainer, the file is the only result
            raise HeadraceError(f"groups cannot be written: {env.counts.tracebacks[-1].splitlines()[-1]}")
        with env.counts.guard("wandb_log"):
            await env.wandb_log({})
        env.curr_step += 1
        return True


def _why_none(env: EnvCore, stopped: bool) -> str:
    """Why no group was made."""
    last = f"; the last item came to nothing with: {env.counts.last_failure}" if env.counts.last_failure else ""
    if stopped:
        return f"it was stopped with {env.counts.items} items begun{last}"
    return f"there are no more items after {env.counts.items}{last}" if env.counts.items else "there are no items"


async def process(env: EnvCore, groups: int) -> None:
    """Makes so many groups, into the environment's file and a page of it, and closes the environment.

    Raises `HeadraceError` where no group was made. What was written stays, and has its page, however it ends; without
    a group there is neither file nor page.
    """
    if groups < 0:
        raise InvalidInput(f"total_steps is {groups}: without a trainer it must say how many groups are made")
    processing = Processing(env, groups)
    try:
        await processing.run()
        env.counts.log_skipped()
        stopped = processing.stop.asked.is_set()
        if processing.done == 0 < groups:
            raise HeadraceError(f"no group was made: {_why_none(env, stopped)}")
        if processing.done < groups and not stopped:
            log.info("there are no more items: %d of %d groups", processing.done, groups)
    finally:
        await env.close()
        if env.jsonl_writer is not None and env.jsonl_writer.written:
            with env.counts.guard("page"):
                tokenizer = env.config.tokenizer_name if env.names_tokenizer else None
                await asyncio.to_thread(write_page, env.jsonl_writer.path, title=env.name, tokenizer=tokenizer)


async def evaluate(env: EnvCore) -> None:
    """Evaluates once and closes the environment. Metrics that it logs by `wandb_log` or returns, instead of calling
    `evaluate_log`, are written all the same.
    """
    began = time.time()
    try:
        await env.preflight()
        await env.setup()
        await env.open_wandb()
        returned = await env.evaluate()
        with env.counts.guard("wandb_log"):  # a failure to log must not cost the evaluation
            await env.wandb_log({})
        if env.last_evaluation is None:
            told = {name: value for name, value in env.metrics_log.last.items() if not name.startswith("train")}
            found = returned if isinstance(returned, Mapping) else flat(told)
            await env.evaluate_log(found, start_time=began, end_time=time.time())
    finally:
        await env.close()
