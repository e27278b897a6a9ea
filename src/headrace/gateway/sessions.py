"""The sessions of a gateway: found in memory, else asked of the pool; the least used are forgotten first."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from headrace.data.step import Step
from headrace.gateway.errors import Refusal
from headrace.gateway.session import Session
from headrace.pool.calls import AsyncPool
from headrace.pool.errors import Gone, NotFound

#: Sessions kept, however few tokens they hold.
MOST = 100_000


class Sessions:
    """A cache over the pool's running trajectories. `open_unknown`: a call for an unknown one begins it."""

    def __init__(
        self, pool: AsyncPool, flushed: Callable[[str], Awaitable[None]], *, most_tokens: int, open_unknown: bool
    ) -> None:
        """`flushed` returns once the pool has everything that was handed over of a trajectory."""
        self._pool = pool
        self._flushed = flushed
        self._most_tokens = most_tokens
        self._open_unknown = open_unknown
        self._known: OrderedDict[str, Session] = OrderedDict()
        self._loading: dict[str, asyncio.Task[Session]] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._known)

    @property
    def tokens(self) -> int:
        return self._tokens

    async def running(self, uid: str, prompt_uid: str, channel: str, *, begin: bool) -> Session:
        """The session of a call; 404 where there is no such trajectory, 409 where it is complete. One that the call
        itself begins is in `channel`; without `begin` it is one that nobody keeps."""
        session = self._known.get(uid)
        if session is None:
            try:
                session = await self.find(uid)
            except Gone as error:
                raise Refusal(f"{error}; begin another trajectory", 409, code="trajectory_complete") from None
            except NotFound:
                session = await self._begun(uid, prompt_uid, channel, begin)
        else:
            self._known.move_to_end(uid)
        if session.complete:
            raise Refusal(
                f"trajectory {uid!r} is complete; begin another with /init_trajectory", 409, code="trajectory_complete"
            )
        if session.prompt_uid != prompt_uid:
            raise Refusal(
                f"trajectory {uid!r} belongs to group {session.prompt_uid!r}, not {prompt_uid!r}: "
                "use the base_url that /init_trajectory returned",
                404,
                code="unknown_trajectory",
            )
        return session

    async def beside(self, session: Session, uid: str, channel: str, *, begin: bool) -> Session:
        """The session that holds what another model samples for an agent's trajectory. With `begin`, one that is not
        there is begun; otherwise it is one that nobody keeps."""
        known = self._known.get(uid)
        if known is None:
            try:
                known = await self.find(uid)
            except Gone as error:
                raise Refusal(f"{error}; begin another trajectory", 409, code="trajectory_complete") from None
            except NotFound:
                if not begin:
                    return Session(uid, session.prompt_uid, channel, session.sampling)
                await self._flushed(session.uid)
                agents = await self._pool.trajectory(session.uid, session.channel)
                await self._pool.open(uid, session.prompt_uid, channel, agents.metadata, agents.n_rollouts)
                known = self.add(Session(uid, session.prompt_uid, channel, session.sampling))
        else:
            self._known.move_to_end(uid)
        return known

    async def find(self, uid: str) -> Session:
        """The session, wherever it is; the pool's `NotFound` or `Gone` where there is none."""
        session = self._known.get(uid)
        if session is not None:
            return session
        task = self._loading.get(uid)
        if task is None:
            task = self._loading[uid] = asyncio.ensure_future(self._load(uid))
            task.add_done_callback(lambda _: self._loading.pop(uid, None))
        return await asyncio.shield(task)

    async def refresh(self, session: Session) -> None:
        """Reads a session anew: another process may have gone on with it."""
        await self._flushed(session.uid)
        trajectory = await self._pool.trajectory(session.uid, session.channel)
        before = session.tokens
        session.read(trajectory.steps)
        session.complete = trajectory.complete
        self._tokens += session.tokens - before

    async def recorded(self, session: Session) -> list[Step]:
        """What the pool has of a trajectory, whoever sampled it."""
        await self._flushed(session.uid)
        return list((await self._pool.trajectory(session.uid, session.channel)).steps)

    def add(self, session: Session) -> Session:
        known = self._known.setdefault(session.uid, session)
        if known is session:
            self._tokens += session.tokens
            self._trim()
        return known

    def drop(self, uid: str) -> None:
        session = self._known.pop(uid, None)
        if session is not None:
            self._tokens -= session.tokens

    @contextmanager
    def using(self, session: Session) -> Iterator[None]:
        """While a call runs, its session is not forgotten."""
        session.busy += 1
        try:
            yield
        finally:
            session.busy -= 1

    def grown(self, session: Session, tokens: int) -> None:
        """A call added so many tokens to what its session holds."""
        session.tokens += tokens
        if self._known.get(session.uid) is session:
            self._tokens += tokens
            self._trim()

    async def _load(self, uid: str) -> Session:
        await self._flushed(uid)
        return self.add(Session.of(await self._pool.trajectory(uid)))

    async def _begun(self, uid: str, prompt_uid: str, channel: str, begin: bool) -> Session:
        if not self._open_unknown:
            raise Refusal(
                f"no trajectory {uid!r}: begin one with POST /init_trajectory, or register this one with "
                "POST {base_url}/v1/register_trajectory",
                404,
                code="unknown_trajectory",
            )
        if not begin:
            return Session(uid, prompt_uid, channel)
        await self._pool.open(uid, prompt_uid, channel)
        return await self._load(uid)  # not with another call's, which may have begun before it was opened

    def _trim(self) -> None:
        """Forgets the least used, as many as are too many: it looks at no more than these and those in use."""
        tokens, sessions = self._tokens - self._most_tokens, len(self._known) - MOST
        dropped: list[str] = []
        for uid, session in self._known.items():
            if tokens <= 0 and sessions <= 0:
                break
            if not session.busy:
                dropped.append(uid)
                tokens, sessions = tokens - session.tokens, sessions - 1
        for uid in dropped:
            self.drop(uid)
