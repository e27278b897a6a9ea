"""A run as environments know it: registered at a pool whose channel they feed, and told when it ends.

Environments wait for a trainer, take its batch size and steps over, and finish when it does. Nobody has to tell them:
a run on a channel that a pool serves from scored groups (`--serve-channel`) registers itself, and registers again where
the pool was restarted without a journal. Elsewhere nothing happens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from headrace.pool.errors import PoolUnreachable
from headrace.pool.scored.types import Registration, RegistrationResult, ScoredInfo
from headrace.trainer.config import TrainerConfig
from headrace.trainer.stopping import Stopped

log = logging.getLogger(__name__)


class PoolCalls(Protocol):
    """Calls a pool's methods by name: from the main thread, or from one that nothing waits for."""

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any: ...

    def inline(self, name: str, *args: Any, **kwargs: Any) -> Any: ...


class RunRegistration:
    """The registration of one run. `step` says how many steps it has made."""

    def __init__(self, pool: PoolCalls, config: TrainerConfig, step: Callable[[], int]) -> None:
        self._pool, self._config, self._step = pool, config, step
        self._uuid: int | None = None

    def begin(self) -> None:
        """Registers, where environments feed the run's channel. Its settings and its step hold from then on."""
        if self._feeds(self._pool.call("desk_info")):
            self._registered(self._pool.call("desk_register", self._about(), restart=True))

    def keep(self) -> None:
        """Registers where the pool does not know the run (any more). For a thread that nothing waits for."""
        info = self._pool.inline("desk_info")
        if self._feeds(info) and (info.registration is None or info.by_fetch):
            self._registered(self._pool.inline("desk_register", self._about(), restart=True))

    def end(self) -> None:
        """Tells environments that the run takes no more of their groups. One that is away is not waited for."""
        if self._uuid is None:
            return
        try:
            self._pool.call("desk_end", self._uuid)
        except (Stopped, PoolUnreachable):
            log.warning("environments could not be told that the run has ended: they wait for the next one")

    def _feeds(self, info: ScoredInfo) -> bool:
        return info.serving == self._config.pool.channel

    def _registered(self, found: RegistrationResult) -> None:
        self._uuid = found.uuid
        log.info("environments feed channel %s: registered as their trainer", self._config.pool.channel)

    def _about(self) -> Registration:
        config = self._config
        return Registration(
            wandb_group=config.run.name,
            wandb_project=config.log.wandb or "",
            batch_size=config.pool.batch_size * (config.pool.n_rollouts or 1),
            max_token_len=config.max_length or -1,
            checkpoint_dir=str(config.run.absolute()),
            save_checkpoint_interval=config.checkpoint.every,
            starting_step=self._step(),
            num_steps=config.steps,
            batch_groups=config.pool.batch_size,
        )
