"""Groups on their way to the Trajectory API: in order, one post at a time, until each is acknowledged.

A group is dropped only once the API has acknowledged it. One that cannot be sent at once is written to the spool, from
which the next process sends it should this one be killed. Temporary failures (an API that is away, a file that cannot
be read) are retried with growing pauses; only `close` ends the sender. When the spool is full, callers wait for room.

A file of the spool holds a post's JSON as it will be sent, and is named by its number, its count of groups and its
idempotency key. It is there whole or not at all, and removed once the post is acknowledged. The file `lock` says which
format they have. Files are written, not synced: they survive a killed process, though not always a crashed machine. A
file a post, and not one file of frames as the gateway's outbox has it: a post is a whole group, few come a second, and
one can be looked at or removed by hand.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import random
import re
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from headrace.data.errors import InvalidInput
from headrace.envs.api_client import ApiAway, ApiClient, ApiRefused
from headrace.files import check_format

log = logging.getLogger("headrace.envs")

#: Bytes of posts that may be in memory without a file; what is beyond is written at once.
MAX_IN_MEMORY_BYTES = 64 << 20
#: Seconds before the first retry, doubled up to the longest pause: an API that restarts is found again quickly.
RETRY_S, MAX_RETRY_S = 0.1, 5.0
#: Seconds that a response may take before waiting posts are written to disk.
WRITE_S = 1.0

#: The format of the files. A release whose files this one would misread, or pass over, raises it.
FORMAT_VERSION = 1

_NAME = re.compile(r"(\d{12})-(\d+)-([0-9a-f]+)\.json")


@dataclass(slots=True)
class GroupPost:
    """One post. `body` is None once it is in the spool's folder."""

    number: int
    groups: int
    key: str
    size: int
    body: bytes | None = None

    @property
    def name(self) -> str:
        """The name of its file: numbered in the order of posts, with its groups and its key."""
        return f"{self.number:012}-{self.groups}-{self.key}.json"


class GroupSpool:
    """A folder of unacknowledged posts, locked by one process. Without a given one, a temporary folder, which is
    removed at the end unless a post is left in it. Raises `InvalidInput` for a folder that cannot be used, or that a
    later release has written to.
    """

    def __init__(self, folder: Path | None) -> None:
        self._temporary = folder is None
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="headrace-spool-")) if folder is None else folder
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidInput(f"spool_dir {folder or tempfile.gettempdir()} cannot be written: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise InvalidInput(f"spool_dir {self.folder} is in use: give each environment its own") from error
        self._mark_format()
        self._next = self._in_memory = 0
        self._warned = False

    def _mark_format(self) -> None:
        """Says in the locked file which format the others have; refuses a folder of a later one."""
        try:
            check_format(self.folder, os.pread(self._lock, 1000, 0), FORMAT_VERSION, "name another folder as spool_dir")
        except InvalidInput:
            os.close(self._lock)
            raise
        try:
            os.pwrite(self._lock, orjson.dumps({"format_version": FORMAT_VERSION}), 0)
        except OSError as error:  # a disk that is full: the first format is what no mark says
            log.warning("%s cannot be written: %s", self.folder / "lock", error)

    def left(self) -> Iterator[GroupPost]:
        """The posts that an earlier process left, in its order. Half-written ones were never accepted, and go."""
        for path in sorted(self.folder.iterdir()):
            found = _NAME.fullmatch(path.name)
            if found is not None:
                post = GroupPost(int(found[1]), int(found[2]), found[3], path.stat().st_size)
                self._next = max(self._next, post.number + 1)
                yield post
            elif path.suffix == ".part":
                path.unlink(missing_ok=True)

    @property
    def memory_full(self) -> bool:
        """Whether posts in memory take all that they may."""
        return self._in_memory >= MAX_IN_MEMORY_BYTES

    def add(self, body: bytes, groups: int, key: str) -> GroupPost:
        """A new post, in memory."""
        post = GroupPost(self._next, groups, key, len(body), body)
        self._next += 1
        self._in_memory += post.size
        return post

    def write(self, post: GroupPost) -> None:
        """Writes a post to the folder, so that it survives the process. One that cannot be written stays in memory."""
        if post.body is None:
            return
        part = self.folder / f"{post.name}.part"
        try:
            part.write_bytes(post.body)
            part.rename(self.folder / post.name)
        except OSError as error:
            if not self._warned:
                log.warning("groups wait in memory only, as %s cannot be written: %s", self.folder, error)
            self._warned = True
            _remove(part)
        else:
            self._forget(post)

    def read(self, post: GroupPost) -> bytes:
        """A post's body, from memory or from its file."""
        return post.body if post.body is not None else (self.folder / post.name).read_bytes()

    def done(self, post: GroupPost) -> None:
        """Removes an acknowledged post. A file that cannot be removed is sent again, under the same key."""
        if post.body is None:
            _remove(self.folder / post.name)
        self._forget(post)

    def set_aside(self, post: GroupPost) -> Path:
        """Moves a post that the API refused for good to `refused/`, for inspection; its path."""
        kept = self.folder / "refused" / post.name
        try:
            kept.parent.mkdir(exist_ok=True)
            if post.body is None:
                (self.folder / post.name).rename(kept)
            else:
                kept.write_bytes(post.body)
        except OSError as error:
            log.warning("%s cannot be written: %s", kept, error)
        self._forget(post)
        return kept

    def _forget(self, post: GroupPost) -> None:
        if post.body is not None:
            self._in_memory -= post.size
            post.body = None

    def close(self) -> None:
        """Unlocks the folder, and removes a temporary one in which no post is left."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        if self._temporary and {path.name for path in self.folder.iterdir()} <= {"lock"}:
            _remove(self.folder / "lock")
            self.folder.rmdir()


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)


class Sender:
    """Of the `accepted` groups, `acknowledged` are at the API and `lost` never will be: refused, or their file gone.

    `acknowledged` is called after each post that is done with.
    """

    def __init__(
        self, client: ApiClient, spool: GroupSpool, *, most_bytes: int, acknowledged: Callable[[], None]
    ) -> None:
        self._client, self._spool = client, spool
        self._most: float = most_bytes
        self._on_acknowledged = acknowledged
        self._queue: deque[GroupPost] = deque()
        self._bytes = self._waiting_for_room = 0
        self._filled, self._room, self._empty = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._empty.set()
        self._env_ids: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None
        self.accepted = self.acknowledged = self.lost = 0
        self.trouble: str | None = None
        self._warned: str | None = None  # the warning of the API's last acknowledgement

    @property
    def waiting(self) -> int:
        """Groups that are not acknowledged yet."""
        return sum(post.groups for post in self._queue)

    @property
    def full(self) -> bool:
        """Whether a caller waits for room."""
        return self._waiting_for_room > 0

    @property
    def settled(self) -> int:
        """Groups that are acknowledged or lost."""
        return self.acknowledged + self.lost

    def start(self) -> None:
        """Starts to send; first what an earlier process left."""
        for post in self._spool.left():
            self._add(post)
            self.accepted += post.groups
        if self._queue:
            log.info("%d groups that an earlier run could not send are sent first", self.waiting)
        self._task = asyncio.create_task(self._run(), name="sender")

    async def put(self, scored: Any) -> None:
        """Takes a group, or a list of groups for one post, once there is room. Takes nothing when cancelled."""
        body = orjson.dumps(scored, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        groups = len(scored) if isinstance(scored, list) else 1
        self.accepted += groups
        self._waiting_for_room += 1
        try:
            while self._queue and self._bytes + len(body) > self._most:
                self._room.clear()
                await self._room.wait()
        except BaseException:
            self.accepted -= groups
            raise
        finally:
            self._waiting_for_room -= 1
        post = self._spool.add(body, groups, uuid.uuid4().hex)
        if self.trouble is not None or self._spool.memory_full:
            self._spool.write(post)
        self._add(post)

    def change_env_id(self, before: int, now: int) -> None:
        """Sends groups of the old id under the new one: the API registered this environment again."""
        self._env_ids = {old: now if new == before else new for old, new in self._env_ids.items()} | {before: now}

    def lift_limit(self) -> None:
        """Takes everything from now on, however full: no new work will start."""
        self._most = float("inf")
        self._room.set()

    async def drain(self, within_s: float) -> int:
        """Waits until everything is acknowledged, at most so long; the number of groups that are not."""
        try:
            async with asyncio.timeout(within_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        return self.waiting

    async def close(self) -> None:
        """Ends the sender. Unacknowledged groups stay in the spool's folder."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._write_all()
        if self._queue:
            log.error(
                "%d groups could not be sent and wait in %s; name it as spool_dir", self.waiting, self._spool.folder
            )
        self._spool.close()

    def _add(self, post: GroupPost) -> None:
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
                self._write_all()
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, MAX_RETRY_S)
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
            self._on_acknowledged()

    async def _send(self, post: GroupPost) -> None:
        """Sends a post and counts its groups as acknowledged or lost; raises temporary failures."""
        try:
            body = self._spool.read(post)
        except FileNotFoundError:
            log.error("%s is gone from the spool: %d groups are lost", post.name, post.groups)
            self.lost += post.groups
            return
        if self._env_ids:
            body = self._readdressed(body)
        path = "/scored_data_list" if body.startswith(b"[") else "/scored_data"
        slow = asyncio.get_running_loop().call_later(WRITE_S, self._write_all)
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

    def _write_all(self) -> None:
        for post in self._queue:
            self._spool.write(post)

    def _readdressed(self, body: bytes) -> bytes:
        """A post under the environment's ids of today. One that is none any more (a file that a crash of the machine
        left) stays as it is: the API refuses it, and it is set aside."""
        try:
            groups = orjson.loads(body)
            for group in groups if isinstance(groups, list) else [groups]:
                group["env_id"] = self._env_ids.get(group.get("env_id"), group.get("env_id"))
            return orjson.dumps(groups)
        except (ValueError, TypeError, AttributeError):
            return body
