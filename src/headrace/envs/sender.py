"""Groups on their way to the Trajectory API: in order, one post at a time, until each is acknowledged.

A group is forgotten when the API has acknowledged it. One that cannot be sent at once is written down, so that the next
process sends it where this one is killed. Whatever passes (an API that
is away, a file that cannot be read just now) is tried again, with longer and longer waits; nothing ends the sender but
`close`. When more waits than there may, those who come with more wait for room.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

import orjson

from headrace.envs.api_client import ApiAway, ApiClient, ApiRefused
from headrace.envs.spool import Post, Spool

log = logging.getLogger("headrace.envs")

#: Seconds before the first try again, and the most between two.
RETRY_S, MOST_RETRY_S = 0.1, 5.0
#: Seconds that an answer may take before what waits for it is written down.
WRITE_S = 1.0


class Sender:
    """`accepted` groups were taken, `acknowledged` of them are at the API, `lost` can never be: refused, or gone."""

    def __init__(self, client: ApiClient, spool: Spool, *, most_bytes: int, acknowledged: Callable[[], None]) -> None:
        self._client, self._spool = client, spool
        self._most: float = most_bytes
        self._told = acknowledged
        self._queue: deque[Post] = deque()
        self._bytes = self._outside = 0
        self._filled, self._room, self._empty = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._env_ids: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None
        self.accepted = self.acknowledged = self.lost = 0
        self.trouble: str | None = None
        self._warned: str | None = None  # what the API said beside its last acknowledgement

    @property
    def waiting(self) -> int:
        """Groups that are not acknowledged yet."""
        return sum(post.groups for post in self._queue)

    @property
    def full(self) -> bool:
        """Whether someone waits for room."""
        return self._outside > 0

    @property
    def settled(self) -> int:
        """Groups that nothing more will become of: at the API, or lost."""
        return self.acknowledged + self.lost

    def start(self) -> None:
        """Begins to send, what an earlier process left first."""
        for post in self._spool.left():
            self._add(post)
            self.accepted += post.groups
        if self._queue:
            log.info("%d groups that an earlier run could not send are sent first", self.waiting)
        self._task = asyncio.create_task(self._run(), name="sender")

    async def put(self, scored: Any) -> None:
        """Takes a group, or a list of groups that go in one post, once there is room for it.

        Cancelled while it waits, it has taken nothing.
        """
        body = orjson.dumps(scored, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        groups = len(scored) if isinstance(scored, list) else 1
        self.accepted += groups
        self._outside += 1
        try:
            while self._queue and self._bytes + len(body) > self._most:
                self._room.clear()
                await self._room.wait()
        except BaseException:
            self.accepted -= groups
            raise
        finally:
            self._outside -= 1
        post = self._spool.add(body, groups, uuid.uuid4().hex)
        if self.trouble is not None or self._spool.crowded:
            self._spool.write(post)
        self._add(post)

    def renamed(self, before: int, now: int) -> None:
        """The API forgot us and registered us anew: what is still owed goes under the new id."""
        self._env_ids = {old: now if new == before else new for old, new in self._env_ids.items()} | {before: now}

    def lift_limit(self) -> None:
        """Lets everyone in who waits for room: no new work will come."""
        self._most = float("inf")
        self._room.set()

    async def drain(self, within_s: float) -> int:
        """Waits until everything is acknowledged, for so long; how many groups are not."""
        try:
            await asyncio.wait_for(self._empty.wait(), within_s)
        except TimeoutError:
            pass
        return self.waiting

    async def close(self) -> None:
        """Ends. What is not acknowledged stays in the spool."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._write_down()
        if self._queue:
            log.error(
                "%d groups could not be sent and wait in %s; name it as spool_dir", self.waiting, self._spool.folder
            )
        self._spool.close()

    def _add(self, post: Post) -> None:
        self._queue.append(post)
        self._bytes += post.size
        self._empty.clear()
        self._filled.set()

    async def _run(self) -> None:
        wait_s = RETRY_S
        while True:
            await self._filled.wait()
            post = self._queue[0]
            try:
                await self._send(post)
            except (ApiAway, OSError) as error:
                if self.trouble is None:
                    log.warning("groups wait for the API: %s", error)
                self.trouble = str(error)
                self._write_down()
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, MOST_RETRY_S)
                continue
            if self.trouble is not None:
                log.info("groups are taken by the API again")
            self.trouble, wait_s = None, RETRY_S
            self._queue.popleft()
            self._bytes -= post.size
            self._room.set()
            if not self._queue:
                self._filled.clear()
                self._empty.set()
            self._told()

    async def _send(self, post: Post) -> None:
        """Sends a post and counts what became of it; raises what passes."""
        try:
            body = self._spool.read(post)
        except FileNotFoundError:
            log.error("%s is gone from the spool: %d groups are lost", post.name, post.groups)
            self.lost += post.groups
            return
        if self._env_ids:
            body = self._readdressed(body)
        path = "/scored_data_list" if body.startswith(b"[") else "/scored_data"
        slow = asyncio.get_running_loop().call_later(WRITE_S, self._write_down)
        try:
            answer = await self._client.post_groups(path, body, post.key)
        except ApiRefused as error:
            log.error("%s: %d groups are kept in %s", error, post.groups, self._spool.set_aside(post))
            self.lost += post.groups
            return
        finally:
            slow.cancel()
        warning = answer.get("warning")
        if warning != self._warned and warning is not None:
            log.warning("the API took what was posted, and says: %s", warning)
        self._warned = warning
        self.acknowledged += post.groups
        self._spool.done(post)

    def _write_down(self) -> None:
        for post in self._queue:
            self._spool.write(post)

    def _readdressed(self, body: bytes) -> bytes:
        groups = orjson.loads(body)
        for group in groups if isinstance(groups, list) else [groups]:
            group["env_id"] = self._env_ids.get(group.get("env_id"), group.get("env_id"))
        return orjson.dumps(groups)
