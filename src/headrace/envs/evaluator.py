"""Evaluations beside the training work: one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.envs.counts import Counts

log = logging.getLogger("headrace.envs")


class Evaluator:
    """`ended` is called after each evaluation, so that held work can go on."""

    def __init__(self, evaluate: Callable[[], Awaitable[Any]], counts: Counts, ended: Callable[[], None]) -> None:
        self._evaluate, self._counts, self._ended = evaluate, counts, ended
        self.task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()

    def begin(self, step: int) -> None:
        if self.running:
            log.warning("the evaluation of step %d is left out: the one before is still running", step)
            return
        log.info("evaluating at step %d", step)
        self.task = asyncio.create_task(self._run(), name="evaluation")

    async def _run(self) -> None:
        try:
            with self._counts.guard("evaluate"):
                await self._evaluate()
                self._counts.evaluations += 1
        finally:
            asyncio.get_running_loop().call_soon(self._ended)  # once the task is done

    async def end(self, *, wait: bool) -> None:
        """Waits for an evaluation under way, or breaks it off: it makes no groups that could be lost."""
        if self.task is None:
            return
        if not wait:
            self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)  # which, cancelled, cancels the evaluation
