"""An environment, watched while it works."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from headrace.envs.counts import Counts
from headrace.envs.progress import Standing, View

if TYPE_CHECKING:
    from headrace.envs.base import BaseEnv

#: Seconds between two looks.
LOOK_S = 0.25
#: Looks that found new scores which the shown mean is taken over.
WINDOW = 20
#: Looks that the curve shows.
SHOWN = 240


class Scores:
    """The mean scores of what came in between two looks."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._sequences, self._sum = 0, 0.0
        self.means: deque[float] = deque(maxlen=SHOWN)

    def look(self) -> None:
        new = self._counts.sequences - self._sequences
        if new:
            self.means.append((self._counts.scores - self._sum) / new)
            self._sequences, self._sum = self._counts.sequences, self._counts.scores

    @property
    def recent(self) -> str:
        last = list(self.means)[-WINDOW:]
        return f"{sum(last) / len(last):.3f}" if last else "-"


def standing(env: BaseEnv, scores: Scores, total: int, unit: str) -> Standing:
    """How an environment stands now."""
    counts = env.counts
    figures = {"score": scores.recent}
    if unit != "groups":
        figures["groups"] = f"{counts.groups:,}"
    if "queue_size" in env.status_dict:
        figures["queue"] = f"{env.status_dict['queue_size']} groups"
    figures["workers"] = f"{len(env.workers)} of {env.max_num_workers}"
    if env.manager is not None and env.manager.held:
        figures["held"] = "for the trainer"
    for name, found in (("skipped", counts.skipped), ("failed", counts.failed)):
        if found:
            why = ", ".join(f"{times:,} {reason}" for reason, times in found.most_common())
            figures[name] = f"{found.total():,} ({why})" if len(found) > 1 else why
    return Standing(env.curr_step, total, unit, list(scores.means), figures)


@asynccontextmanager
async def watched(env: BaseEnv, unit: str, console: Console) -> AsyncIterator[None]:
    """While this lasts, the console shows how the environment stands."""
    scores = Scores(env.counts)

    def look(view: View) -> None:
        scores.look()
        view.update(standing(env, scores, env.config.total_steps, unit))

    async def looking(view: View) -> None:
        while True:
            look(view)
            await asyncio.sleep(LOOK_S)

    with View(console, env.name or type(env).__name__) as view:
        task = asyncio.create_task(looking(view), name="view")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            look(view)
