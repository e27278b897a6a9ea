"""What the Trajectory API says of its queue, asked for again and again.

An API that is away is asked until it is back: meanwhile what is made here counts as waiting, so work is held in time.
One that has forgotten us, as one does that was started anew without a journal, is registered with again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headrace.data.errors import shown
from headrace.envs.api_client import ApiAway
from headrace.envs.schedule import Status
from headrace.envs.sender import Sender

if TYPE_CHECKING:
    from headrace.envs.base import BaseEnv

log = logging.getLogger("headrace.envs")


class Poller:
    """`status` is the last answer; `news` is called after each."""

    def __init__(self, env: BaseEnv, sender: Sender, news: Callable[[], None]) -> None:
        self._env, self._sender, self._news = env, sender, news
        self._settled = 0
        self._away = False
        self.status: Status | None = None
        self.answers = 0

    @property
    def unseen(self) -> int:
        """Groups of ours that the last answer may not count: they were not at the API when it was asked."""
        return self._sender.accepted - self._settled

    async def run(self) -> None:
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
                self._news()
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
        self._sender.renamed(before, self._env.env_id)
