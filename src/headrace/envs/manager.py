"""An environment at work for a trainer: it registers, keeps items running as the schedule allows, and sends everything.

One loop decides. It is woken by whatever could change a decision (a status, a finished item, an evaluation's end, a
request to stop). Each item runs in a task of its own, under `worker_timeout`; one that fails is counted and affects no
other. While the API is away its status is asked for again and again, and groups made meanwhile count as waiting, so
work is held in time. An API that has forgotten this environment, restarted without a journal, is registered at again.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.data.errors import shown
from headrace.envs import schedule
from headrace.envs.api_client import ApiAway, ApiError, retry_until_answered
from headrace.envs.core import EnvCore
from headrace.envs.schedule import Status
from headrace.envs.sender import GroupSpool, Sender
from headrace.envs.stop import StopRequest, wait_for_items
from headrace.envs.types import Item

log = logging.getLogger("headrace.envs")

#: Failures of `get_next_item` in a row after which the environment ends with the error.
MAX_ITEM_FAILURES = 3
#: Seconds that cancelled items may take to end, and the API to answer a disconnection.
END_TIMEOUT_S = 10.0
#: Seconds that an API which is away still has, once the environment is told to end: who stops it should not wait.
AWAY_TIMEOUT_S = 1.0
#: Seconds that a finished item yields to the next one's start, before it is encoded and sent: rollouts take longer.
YIELD_S = 0.001


class StatusPoller:
    """Asks for the API's status every `status_poll_s`. `status` is the last one; `on_status` is called after each."""

    def __init__(self, env: EnvCore, sender: Sender, on_status: Callable[[], None]) -> None:
        self._env, self._sender, self._on_status = env, sender, on_status
        self._settled = 0
        self._away = False
        self.status: Status | None = None
        self.answers = 0

    @property
    def unseen(self) -> int:
        """Groups of this environment that the last status may not count: the API did not have them when asked."""
        return self._sender.accepted - self._settled

    async def run(self) -> None:
        """Polls until it is cancelled; raises what is not temporary."""
        while True:
            try:
                await self._ask()
            except ApiAway as error:
                if error.status == 404:
                    await self._register_again()
                elif not self._away:
                    log.warning("the API's queue is not known: %s", error)
                self._away = True
            else:
                self._away = False
                self.answers += 1
                self._on_status()
            await asyncio.sleep(self._env.config.status_poll_s)

    async def _ask(self) -> None:
        if self._env.config.batch_size < 1:
            await self._env.get_server_info()
        settled = self._sender.settled
        await self._env.get_status()
        try:
            self.status = msgspec.convert(self._env.status_dict, Status, strict=False)
        except msgspec.ValidationError as error:
            raise ApiAway(f"/status-env answered {shown(self._env.status_dict)}: {error}") from error
        self._settled = settled

    async def _register_again(self) -> None:
        before = self._env.env_id
        log.warning("the API does not know environment %d any more: registering again", before)
        await self._env.register_env()
        self._sender.change_env_id(before, self._env.env_id)


class Manager:
    """One environment's work for a trainer, from `setup` to its last group. `stop` ends it."""

    def __init__(self, env: EnvCore) -> None:
        self._env = env
        self.stop = StopRequest()
        config = env.config
        spool = GroupSpool(Path(config.spool_dir) if config.spool_dir is not None else None)
        self.sender = Sender(env.api, spool, most_bytes=config.spool_max_mb << 20, acknowledged=self.wake)
        self.poller = StatusPoller(env, self.sender, self.wake)
        self._woken = asyncio.Event()
        self._timeouts: dict[asyncio.Task[Any] | None, asyncio.Timeout] = {}
        self._collected: set[asyncio.Task[Any] | None] = set()
        self._handed_over: set[asyncio.Task[Any] | None] = set()
        self._item_failures = 0
        self._checked = 0
        self._held_since: float | None = None

    def wake(self) -> None:
        """Lets the loop look again at what may start."""
        self._woken.set()

    async def run(self) -> None:
        """Returns once all steps are done, or after a stop; raises what the environment cannot go on from."""
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
        await env.preflight()
        await env.setup()
        await env.register_env()
        await retry_until_answered(env.setup_wandb, env.config.status_poll_s)
        await retry_until_answered(env.get_server_info, env.config.status_poll_s)
        self.sender.start()

    async def _work(self) -> None:
        polling = asyncio.create_task(self.poller.run(), name="poller")
        polling.add_done_callback(lambda _: self.wake())
        try:
            while not polling.done():
                self._env.counts.give_up_after(self._env.max_failures)
                if await self._turn():
                    return
                await self._woken.wait()
                self._woken.clear()
            polling.result()
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    async def _turn(self) -> bool:
        """Acts on the current status: checks the step, notes a hold, starts items. Whether all steps are done."""
        status = self.poller.status
        if status is None:
            return False
        if self._checked != self.poller.answers:
            self._checked = self.poller.answers
            await self._env.env_step_checks()
            if schedule.finished(self.rules, status):
                if status.ended_at is not None:
                    log.info("the trainer has ended at step %d", status.ended_at)
                else:
                    log.info("all %d steps are done", self._env.config.total_steps)
                return True
        self._note_hold(schedule.held(self.rules, status, self.load))
        if self.may_start:
            await self._env.add_train_workers()
        return False

    @property
    def rules(self) -> schedule.Rules:
        """The configuration that decides what may start."""
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
    def load(self) -> schedule.EnvLoad:
        """What is under way."""
        items = len(self._env.workers)
        return schedule.EnvLoad(
            running=items - len(self._collected),
            coming=items - len(self._handed_over) + self.poller.unseen,
            evaluating=self._env.evaluator.running,
            full=self.sender.full,
        )

    @property
    def may_start(self) -> bool:
        """Whether an item may start; never before the first status of the API."""
        status = self.poller.status
        return status is not None and schedule.may_start(self.rules, status, self.load)

    @property
    def held(self) -> bool:
        """Whether no work is started, since enough waits for the trainer."""
        return self._held_since is not None

    def _note_hold(self, held: bool) -> None:
        now = time.monotonic()
        if held and self._held_since is None:
            log.info("paused: %s for the trainer", self._waiting)
            self._held_since = now
            self._env.counts.pauses += 1
            self._write_event("paused", self._counted)
        elif not held and self._held_since is not None:
            log.info("resumed after %.1f s: %s for the trainer", now - self._held_since, self._waiting)
            self._env.counts.paused_s += now - self._held_since
            self._write_event("resumed", {**self._counted, "after_s": now - self._held_since})
            self._held_since = None

    def _write_event(self, event: str, about: dict[str, float]) -> None:
        """Writes an event to the metrics."""
        env = self._env
        env.metrics_log.event(env.curr_step, event, env.counts.pauses, about, env.wandb_prepend)

    @property
    def _counted(self) -> dict[str, float]:
        """What a hold is decided by: groups that wait for the trainer, and those of this environment still to come."""
        status = self.poller.status
        return {"queued": status.queue_size if status is not None else 0, "coming": self.load.coming}

    @property
    def _waiting(self) -> str:
        status, counted = self.poller.status, self._counted
        said = f" ({status.warning})" if status is not None and status.warning else ""
        return f"{counted['queued']} groups wait{said}, and {counted['coming']} of ours will,"

    async def start_workers(self) -> None:
        """Starts items while the schedule allows it and `get_next_item` has some."""
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
            if self._item_failures >= MAX_ITEM_FAILURES:
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
            env.counts.item_failed(f"nothing after worker_timeout, {limit:g} s" if late else str(error))

    def _ended(self, name: str, worker: asyncio.Task[None]) -> None:
        self._env.running_items.pop(name, None)
        self._env.workers.discard(worker)
        self._timeouts.pop(worker, None)
        self._collected.discard(worker)
        self._handed_over.discard(worker)
        self.wake()

    async def collected(self) -> None:
        """The calling item's rollouts are done: its time limit ends, and another item may start. Yields to that one, so
        that its rollouts begin before this item's groups are encoded."""
        task = asyncio.current_task()
        timeout = self._timeouts.get(task)
        if timeout is None:
            return
        if not timeout.expired():
            timeout.reschedule(None)
        self._collected.add(task)
        self.wake()
        await asyncio.sleep(YIELD_S)

    async def send(self, scored: Any) -> None:
        """Hands groups to the sender; from now on they are counted there, not as running."""
        task = asyncio.current_task()
        if task in self._timeouts:
            self._handed_over.add(task)
        await self.sender.put(scored)

    async def _end(self, complete: bool) -> None:
        """Finishes running items, sends what is not acknowledged, disconnects and closes the environment."""
        env, forced = self._env, self.stop.forced
        self.sender.lift_limit()
        await self._finish_workers()
        await self.stop.or_done(env.evaluator.end(wait=complete))
        await self.stop.or_done(self._drain(), forced)
        await self.sender.close()
        env.counts.log_skipped()
        if env.items_sent_this_step:
            with env.counts.guard("wandb_log"):
                await env.wandb_log({})
        try:
            async with asyncio.timeout(AWAY_TIMEOUT_S if self._gives_up_on_api else END_TIMEOUT_S):
                await env.disconnect_env()
        except (ApiError, TimeoutError) as error:
            log.warning("the API was not told that we leave: %s", str(error) or "it did not answer")
        await env.close()

    async def _drain(self) -> None:
        """Waits for the API to acknowledge everything: at most `drain_s`, and no longer once it is given up."""
        left = self._env.config.drain_s
        while await self.sender.drain(min(left, AWAY_TIMEOUT_S)):
            left -= AWAY_TIMEOUT_S
            if left <= 0 or self._gives_up_on_api:
                return

    @property
    def _gives_up_on_api(self) -> bool:
        """Whether to end without the API: forced, or asked to while it is away. Groups stay in the spool."""
        return self.stop.forced.is_set() or (self.stop.asked.is_set() and self.sender.trouble is not None)

    async def _finish_workers(self) -> None:
        env = self._env
        if env.workers and not self.stop.forced.is_set():
            log.info("%d items are finished before the end; stop again to break them off", len(env.workers))
            await self.stop.or_done(wait_for_items(env.workers, env.server), self.stop.forced)
        for worker in env.workers:
            worker.cancel()
        if env.workers:
            _, stuck = await asyncio.wait(set(env.workers), timeout=END_TIMEOUT_S)
            if stuck:
                log.error("%d items could not be broken off", len(stuck))
