"""An environment at work: it registers, keeps items running as the schedule allows, and ends with everything sent.

One loop decides. It is woken by what could change a decision (a status, a finished item, an evaluation's end, a request
to stop) and waits otherwise. Items run as tasks of their own, each under `worker_timeout`; one that fails is counted
and takes nothing with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.envs import schedule
from headrace.envs.api_client import ApiError
from headrace.envs.poller import Poller
from headrace.envs.preflight import preflight
from headrace.envs.registration import patiently
from headrace.envs.sender import Sender
from headrace.envs.spool import Spool
from headrace.envs.stop import Stop, finished
from headrace.envs.types import Item

if TYPE_CHECKING:
    from headrace.envs.base import BaseEnv

log = logging.getLogger("headrace.envs")

#: Times in a row that `get_next_item` may raise before the environment ends with its error.
MOST_ITEM_FAILURES = 3
#: Seconds that cancelled work has to end, and that the API has to hear that we leave.
GRACE_S = 10.0
#: Seconds that an API which is away has, when an environment is told to end.
AWAY_S = 1.0
#: Seconds that a finished item leaves to the next one's beginning before it is packed and sent.
BEGIN_S = 0.001


class Manager:
    """One environment's work, from `setup` to its last group. `stop` ends it."""

    def __init__(self, env: BaseEnv) -> None:
        self._env = env
        self.stop = Stop()
        config = env.config
        spool = Spool(Path(config.spool_dir) if config.spool_dir is not None else None)
        self.sender = Sender(env.api, spool, most_bytes=config.spool_max_mb << 20, acknowledged=self.wake)
        self.poller = Poller(env, self.sender, self.wake)
        self._woken = asyncio.Event()
        self._timeouts: dict[asyncio.Task[Any] | None, asyncio.Timeout] = {}
        self._collected: set[asyncio.Task[Any] | None] = set()
        self._handed_over: set[asyncio.Task[Any] | None] = set()
        self._item_failures = 0
        self._checked = 0
        self._held_since: float | None = None

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Returns when all steps are done, or after a stop; raises what an environment cannot go on from."""
        complete = False
        with self.stop.on_signals():
            try:
                await self.stop.or_done(self._begin())
                if not self.stop.asked.is_set():
                    await self.stop.or_done(self._work())
                complete = True
            except asyncio.CancelledError:
                self.stop.asked.set()
                self.stop.forced.set()
                raise
            finally:
                await self._end(complete and not self.stop.asked.is_set())

    async def _begin(self) -> None:
        env = self._env
        await preflight(env)
        await env.setup()
        await env.register_env()
        await patiently(env.setup_wandb, env.config.status_poll_s)
        await patiently(env.get_server_info, env.config.status_poll_s)
        self.sender.start()

    async def _work(self) -> None:
        polling = asyncio.create_task(self.poller.run(), name="poller")
        polling.add_done_callback(lambda _: self.wake())
        try:
            while not polling.done():
                self._env.counts.give_up_after(self._env.most_failures)
                if await self._turn():
                    return
                await self._woken.wait()
                self._woken.clear()
            polling.result()
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    async def _turn(self) -> bool:
        """Looks at what is known and acts on it; whether all the work is done."""
        status = self.poller.status
        if status is None:
            return False
        if self._checked != self.poller.answers:
            self._checked = self.poller.answers
            await self._env.env_step_checks()
            if schedule.finished(self.rules, status):
                log.info("all %d steps are done", self._env.config.total_steps)
                return True
        self._note_hold(schedule.held(self.rules, status, self.load))
        if self.may_start:
            await self._env.add_train_workers()
        return False

    @property
    def rules(self) -> schedule.Rules:
        config = self._env.config
        return schedule.Rules(
            group_size=config.group_size,
            batch_size=config.batch_size,
            max_batches_offpolicy=config.max_batches_offpolicy,
            total_steps=config.total_steps,
            max_workers=self._env.max_num_workers,
            eval_handling=config.eval_handling,
            eval_limit_ratio=config.eval_limit_ratio,
            min_batch_allocation=config.min_batch_allocation,
        )

    @property
    def load(self) -> schedule.Load:
        items = len(self._env.workers)
        return schedule.Load(
            running=items - len(self._collected),
            coming=items - len(self._handed_over) + self.poller.unseen,
            evaluating=self._env.evaluator.running,
            full=self.sender.full,
        )

    @property
    def may_start(self) -> bool:
        status = self.poller.status
        return status is not None and schedule.may_start(self.rules, status, self.load)

    @property
    def held(self) -> bool:
        return self._held_since is not None

    def _note_hold(self, held: bool) -> None:
        now = time.monotonic()
        if held and self._held_since is None:
            log.info("paused: %s for the trainer", self._waiting)
            self._held_since = now
            self._env.counts.pauses += 1
        elif not held and self._held_since is not None:
            log.info("resumed after %.1f s: %s for the trainer", now - self._held_since, self._waiting)
            self._env.counts.paused_s += now - self._held_since
            self._held_since = None

    @property
    def _waiting(self) -> str:
        status = self.poller.status
        queued = status.queue_size if status is not None else 0
        said = f" ({status.warning})" if status is not None and status.warning else ""
        return f"{queued} groups wait{said}, and {self.load.coming} of ours will,"

    async def start_workers(self) -> None:
        """Starts items for as long as the schedule allows and `get_next_item` has some."""
        env = self._env
        before = len(env.workers)
        while self.may_start:
            item = env.backlog.pop() if env.backlog else await self._next_item()
            if item is None:
                break
            self._start(item)
        env.workers_added_list.append(len(env.workers) - before)

    async def _next_item(self) -> Item | None:
        try:
            item = await self._env.get_next_item()
        except Exception as error:
            self._env.counts.fail("get_next_item", error)
            self._item_failures += 1
            if self._item_failures >= MOST_ITEM_FAILURES:
                raise
            return None
        self._item_failures = 0
        return item

    def _start(self, item: Item) -> None:
        env = self._env
        name = uuid.uuid4().hex
        worker = asyncio.create_task(self._run_item(name, item), name=f"item {name}")
        env.running_items[name] = {"item": item, "worker": worker, "start_time": time.time()}
        env.workers.add(worker)
        env.counts.items += 1
        worker.add_done_callback(lambda _: self._ended(name, worker))

    async def _run_item(self, name: str, item: Item) -> None:
        env = self._env
        limit = env.config.worker_timeout
        timeout = self._timeouts[asyncio.current_task()] = asyncio.timeout(limit if limit > 0 else None)
        try:
            async with timeout:
                if await env.handle_env(name):
                    env.last_completed_item = item
        except Exception as error:
            late = isinstance(error, TimeoutError) and timeout.expired()
            env.counts.fail("timeout" if late else "item", error)
            env.counts.came_to_nothing(f"nothing after worker_timeout, {limit:g} s" if late else str(error))

    def _ended(self, name: str, worker: asyncio.Task[None]) -> None:
        self._env.running_items.pop(name, None)
        self._env.workers.discard(worker)
        self._timeouts.pop(worker, None)
        self._collected.discard(worker)
        self._handed_over.discard(worker)
        self.wake()

    async def collected(self) -> None:
        """The item that the caller works on has its groups: no time limit may take them from it any more, and another
        item may have its place. That one's rollouts begin first, as they are what takes long."""
        task = asyncio.current_task()
        timeout = self._timeouts.get(task)
        if timeout is None:
            return
        if not timeout.expired():
            timeout.reschedule(None)
        self._collected.add(task)
        self.wake()
        await asyncio.sleep(BEGIN_S)

    async def send(self, scored: Any) -> None:
        """Hands groups to the sender, which counts them from now on."""
        task = asyncio.current_task()
        if task in self._timeouts:
            self._handed_over.add(task)
        await self.sender.put(scored)

    async def _end(self, complete: bool) -> None:
        """Finishes what runs, sends what is owed, and takes leave."""
        env, forced = self._env, self.stop.forced
        self.sender.lift_limit()
        await self._finish_workers()
        await self.stop.or_done(env.evaluator.end(wait=complete))
        await self.stop.or_done(self._drain(), forced)
        await self.sender.close()
        env.counts.tell_skipped()
        if env.items_sent_this_step:
            with env.counts.guard("wandb_log"):
                await env.wandb_log({})
        try:
            async with asyncio.timeout(AWAY_S if self._left_behind else GRACE_S):
                await env.disconnect_env()
        except (ApiError, TimeoutError) as error:
            log.warning("the API was not told that we leave: %s", str(error) or "it did not answer")
        await env.close()

    async def _drain(self) -> None:
        """Waits for the API to take what is owed, for `drain_s`, or until it is away and we are told to end."""
        left = self._env.config.drain_s
        while await self.sender.drain(min(left, AWAY_S)):
            left -= AWAY_S
            if left <= 0 or self._left_behind:
                return

    @property
    def _left_behind(self) -> bool:
        """Whether it is told to end while the API is away: what is owed is written down, for the next start."""
        return self.stop.forced.is_set() or (self.stop.asked.is_set() and self.sender.trouble is not None)

    async def _finish_workers(self) -> None:
        env = self._env
        if env.workers and not self.stop.forced.is_set():
            log.info("%d items are finished before the end; stop again to break them off", len(env.workers))
            await self.stop.or_done(finished(env.workers, env.server), self.stop.forced)
        for worker in env.workers:
            worker.cancel()
        if env.workers:
            _, deaf = await asyncio.wait(set(env.workers), timeout=GRACE_S)
            if deaf:
                log.error("%d items could not be broken off", len(deaf))
