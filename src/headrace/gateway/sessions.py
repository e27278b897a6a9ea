"""`Session`: what a gateway knows of one running trajectory; `Sessions`: all of them, the least used forgotten first.

A session is a cache: the pool can always be asked again, and a session rebuilt from the pool's steps continues a
conversation with the same exact tokens as the one that was lost. Part of it are the stored responses that an agent may
go on from by naming an answer: a step keeps only what is new in it and which call it goes on from, so that a
trajectory's text is kept once, and any gateway on the same pool finds it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import msgspec
from msgspec.structs import replace

from headrace.data.block import TOKEN_BYTES
from headrace.data.errors import InvalidInput
from headrace.data.step import IntArray, Step
from headrace.data.trajectory import Trajectory
from headrace.gateway.errors import Refusal
from headrace.gateway.request import CallRequest, checked_sampling
from headrace.gateway.retries import Retries
from headrace.gateway.stamps import SessionStamps
from headrace.gateway.turn import TextKey, digest_of
from headrace.pool.calls import AsyncPool
from headrace.pool.errors import Gone, NotFound
from headrace.tokens import History, Image, Message, Node
from headrace.tokens.images import image_files
from headrace.tokens.messages import images_of

#: Where a trajectory's metadata says which parameters its calls are sampled with, whatever they ask for.
SAMPLING_FIELD = "forced_sampling"
#: Where a step's metadata says which request it answers, and what text its prompt and answer are.
REQUEST_FIELD, TEXT_FIELD = "request", "text"

#: Where a step's metadata holds what a later call may go on from.
STORED_FIELD = "kept"

#: Sessions in memory, however few tokens they hold: some 2 kB each even without any.
MAX_SESSIONS = 100_000
#: Sessions that are looked at for each that is taken in: whether another worker ended them. With two, about as
#: many of those are kept as there are under way.
SWEPT_FOR_EACH = 2


class StoredResponse(msgspec.Struct, frozen=True):
    """What one call adds to a conversation: its new messages and its answer, behind those of the call `before`.

    Messages that open a conversation for one call alone are not among them; `opening` says how many there were.
    """

    before: str | None
    opening: int
    messages: tuple[Message, ...]

    @property
    def tokens(self) -> int:
        """As many as take its memory: of its texts, and of its images' files."""
        texts = sum(len(message.content) for message in self.messages)
        return (texts + sum(len(image.data) for image in images_of(self.messages))) // TOKEN_BYTES

    def to_metadata(self) -> str:
        """As text: arguments of calls may nest deeper than metadata may. Images' files are the step's own already."""
        return msgspec.json.encode(self._with_files({})).decode()

    @classmethod
    def from_metadata(cls, given: Any, files: Mapping[str, bytes]) -> StoredResponse | None:
        """The response in a step's metadata; None where a flow wrote something of its own there, or an image is lost.
        `files` are those of the step's images."""
        try:
            found = msgspec.json.decode(given, type=cls) if isinstance(given, str) else None
        except (ValueError, RecursionError):
            return None
        return None if found is None or not found._digests() <= files.keys() else found._with_files(files)

    def _digests(self) -> set[str]:
        return {image.digest for image in images_of(self.messages)}

    def _with_files(self, files: Mapping[str, bytes]) -> StoredResponse:
        """The same with these files behind its images, or none."""
        if not any(message.parts for message in self.messages):
            return self

        def part(given: str | Image) -> str | Image:
            return given if isinstance(given, str) else replace(given, data=files.get(given.digest, b""))

        messages = [replace(message, parts=tuple(map(part, message.parts))) for message in self.messages]
        return replace(self, messages=tuple(messages))


class StoredResponses:
    """The stored responses of one trajectory, by call. Those that are not in the pool go with the session; what goes on
    from one of them is stored whole."""

    def __init__(self) -> None:
        self._by_call: dict[str, StoredResponse] = {}
        self._here_alone: set[str] = set()
        self.tokens = 0  # as many as take their memory

    def __contains__(self, call: str) -> bool:
        return call in self._by_call

    def add(self, call: str, stored: StoredResponse) -> None:
        """Stores what a call adds to its conversation."""
        self._by_call[call] = stored
        self.tokens += stored.tokens

    def not_in_pool(self, call: str) -> None:
        """Notes that the pool does not keep what a call added."""
        self._here_alone.add(call)

    def share(self, request: CallRequest, answer: Message, parent: Node | None) -> StoredResponse:
        """What a call is to store: of a conversation that goes on from a stored one, only what is new."""
        assert request.conversation is not None
        messages = request.conversation.messages
        calls = tuple(replace(call, written="") for call in answer.tool_calls)  # it says nothing more
        answer = replace(answer, tool_calls=calls)
        known = self._by_call.get(parent.call) if parent is not None else None
        if parent is None or known is None or parent.call in self._here_alone or known.opening != request.opening:
            return StoredResponse(None, request.opening, (*messages[request.opening :], answer))
        return StoredResponse(parent.call, request.opening, (*messages[parent.record.messages :], answer))

    def answers(self, calls: Iterable[str]) -> dict[str, Message]:
        """The answers to those of the calls that are stored."""
        return {call: self._by_call[call].messages[-1] for call in calls if call in self._by_call}

    def messages(self, call: str) -> tuple[Message, ...] | None:
        """The whole conversation up to a call's answer; None where it is not stored."""
        shares: list[tuple[Message, ...]] = []
        at: str | None = call
        while at is not None:
            stored = self._by_call.get(at)
            if stored is None:
                return None
            shares.append(stored.messages)
            at = stored.before
        return tuple(message for share in reversed(shares) for message in share)


def forced_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that a trajectory's metadata forces; what is none, a flow's own of that name, forces nothing."""
    given = metadata.get(SAMPLING_FIELD)
    try:
        return checked_sampling(given) if isinstance(given, dict) else {}
    except InvalidInput:
        return {}


class TextNode(msgspec.Struct, frozen=True, eq=False):
    """A text completion: the text of its prompt and answer, by length and digest, and its node."""

    length: int
    digest: str
    node: Node


class Session:
    """One trajectory: its group and channel, the tree of its calls, and the calls under way.

    `busy` counts what still needs it, calls and hand-overs; while it is above 0, the session is not forgotten.
    """

    def __init__(self, uid: str, prompt_uid: str, channel: str, sampling: Mapping[str, Any] | None = None) -> None:
        """`sampling`: parameters that it forces on its calls."""
        self.uid = uid
        self.sampling = dict(sampling or {})
        self.prompt_uid = prompt_uid
        self.channel = channel
        self.history = History()
        self.texts: list[TextNode] = []
        self.stored = StoredResponses()
        self.complete = False
        self.steps = 0
        self.tokens = 0
        self.retries = Retries()
        self.busy = 0
        self.is_old = False  # the pool no longer has what this says
        self.stamp: int | None = None  # what `Sessions.stamps` said when it was read

    @classmethod
    def of(cls, trajectory: Trajectory) -> Session:
        """The session of a trajectory as the pool holds it."""
        session = cls(trajectory.uid, trajectory.prompt_uid, trajectory.channel, forced_sampling(trajectory.metadata))
        session.read(trajectory.own_steps)
        session.complete = trajectory.complete
        return session

    def read(self, steps: Iterable[Step]) -> None:
        """Reads the steps that the pool has, with nothing but their own metadata: a row's fields are not the gateway's.
        What was handed over and is not in the pool yet stays."""
        steps = list(steps)
        there = {step.step_index for step in steps}
        before, self.history = self.history, History.from_steps(steps)
        by_index = {node.step: node for node in self.history.nodes}
        for known in before.nodes:
            if known.step not in there:
                self.history.adopt(known)
        self.texts = [text for text in self.texts if text.node.step not in there]
        self.steps = len(steps)
        for step in steps:
            node, text = by_index.get(step.step_index), TextKey.from_metadata(step.metadata.get(TEXT_FIELD))
            if node is not None and text is not None:
                self.texts.append(TextNode(text.length, text.digest, node))
            if step.call_id is not None and step.call_id not in self.stored:
                files = image_files(step.multi_modal_data)
                stored = StoredResponse.from_metadata(step.metadata.get(STORED_FIELD), files)
                if stored is not None:
                    self.stored.add(step.call_id, stored)
        self.tokens = sum(len(node.own) for node in self.history.nodes) + self.stored.tokens

    def continued_text(self, prompt: str) -> tuple[Node, str] | None:
        """The longest earlier completion that a text begins with, and what is new behind it."""
        for known in sorted(self.texts, key=lambda known: -known.length):
            if known.length <= len(prompt) and digest_of(prompt[: known.length].encode()) == known.digest:
                return known.node, prompt[known.length :]
        return None

    def continued_ids(self, prompt: IntArray) -> Node | None:
        """The longest earlier call that a prompt goes on from: it begins with the call's ids, and has more."""
        for node in sorted(self.history.nodes, key=lambda node: -node.total):
            if node.total >= len(prompt) or not (prompt[node.before : node.total] == node.own).all():
                continue
            if (prompt[: node.total] == node.whole()).all():
                return node
        return None


class SessionUse:
    """A call that runs in a session, while it is entered."""

    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session.busy += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session.busy -= 1


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
        self.stamps: SessionStamps | None = None  # of all workers, where this process is one of several
        self._known: OrderedDict[str, Session] = OrderedDict()
        self._loading: dict[str, asyncio.Task[Session]] = {}
        self._tokens = 0
        self._to_sweep: OrderedDict[str, None] = OrderedDict()  # uids, those first that were looked at longest ago

    def __len__(self) -> int:
        return len(self._known)

    @property
    def tokens(self) -> int:
        """Tokens that the sessions in memory hold, and what takes as much memory."""
        return self._tokens

    async def running(self, uid: str, prompt_uid: str, channel: str, *, begin: bool) -> Session:
        """The session of a call; 404 where there is no such trajectory, 409 where it is complete. One that the call
        itself begins is in `channel`; without `begin` it is kept neither here nor in the pool."""
        session = await self._called(uid)
        if session is None:
            session = await self._begun(uid, prompt_uid, channel, begin)
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

    async def for_model(self, session: Session, uid: str, channel: str, *, begin: bool) -> Session:
        """The session that holds what another model samples for an agent's trajectory. With `begin`, one that is not
        there is begun; otherwise it is kept neither here nor in the pool."""
        known = await self._called(uid)
        if known is not None:
            return known
        if not begin:
            return Session(uid, session.prompt_uid, channel, session.sampling)
        await self._flushed(session.uid)
        agents = await self._pool.trajectory(session.uid, session.channel)
        await self._pool.open(uid, session.prompt_uid, channel, agents.metadata, agents.n_rollouts)
        return self.add(Session(uid, session.prompt_uid, channel, session.sampling))

    async def _called(self, uid: str) -> Session | None:
        """The session, now the last to be forgotten; None where there is none, 409 where its trajectory is gone."""
        session = self._current(uid)
        if session is not None:
            self._known.move_to_end(uid)
            return session
        try:
            return await self.find(uid)
        except Gone as error:
            raise _gone(error) from None
        except NotFound:
            return None

    async def find(self, uid: str) -> Session:
        """The session, wherever it is; the pool's `NotFound` or `Gone` where there is none."""
        session = self._current(uid)
        if session is not None:
            return session
        task = self._loading.get(uid)
        if task is None:
            task = self._loading[uid] = asyncio.create_task(self._load(uid))
            task.add_done_callback(partial(self._loaded, uid))
        await asyncio.wait([task])  # a caller that leaves does not end it: others may wait for the same
        return task.result()

    async def refresh(self, session: Session) -> None:
        """Reads a session anew: another process may have gone on with it. One that is kept neither here nor in the pool
        stays as it is; of others, 409 where the trajectory is gone, the pool's `NotFound` where there is none."""
        await self._flushed(session.uid)
        try:
            trajectory = await self._pool.trajectory(session.uid, session.channel)
        except Gone as error:
            raise _gone(error) from None
        except NotFound:
            if self._known.get(session.uid) is session:
                raise
            return  # a call that is not recorded has begun nothing
        before = session.tokens
        session.read(trajectory.own_steps)
        session.complete = trajectory.complete
        if self._known.get(session.uid) is session:  # one that was dropped meanwhile is counted no more
            self._tokens += session.tokens - before

    async def recorded(self, session: Session) -> list[Step]:
        """What the pool has of a trajectory, whoever sampled it, with nothing but the steps' own metadata."""
        await self._flushed(session.uid)
        return (await self._pool.trajectory(session.uid, session.channel)).own_steps

    def add(self, session: Session) -> Session:
        """Takes in a session; the one that is known under its uid already, where there is one."""
        if session.stamp is None and self.stamps is not None:
            session.stamp = self.stamps.of(session.uid)
        known = self._known.setdefault(session.uid, session)
        if known is session:
            self._tokens += session.tokens
            if self.stamps is not None:
                self._sweep()
                self._to_sweep[session.uid] = None
            self._trim()
        return known

    def drop(self, uid: str) -> None:
        """Forgets a session; the next call reads it from the pool."""
        session = self._known.pop(uid, None)
        if session is not None:
            self._tokens -= session.tokens

    def using(self, session: Session) -> SessionUse:
        """While it is entered, its session is not forgotten."""
        return SessionUse(session)

    def grown(self, session: Session, tokens: int) -> None:
        """A call added so many tokens, or what takes as much memory, to what its session holds."""
        session.tokens += tokens
        if self._known.get(session.uid) is session:
            self._tokens += tokens
            self._trim()

    async def _load(self, uid: str) -> Session:
        stamp = self.stamps.of(uid) if self.stamps is not None else None  # before it is read: a change may come between
        await self._flushed(uid)
        session = Session.of(await self._pool.trajectory(uid))
        session.stamp = stamp
        return self.add(session)

    def _current(self, uid: str) -> Session | None:
        """The session in memory; None where there is none, or the pool has another trajectory than it says, since
        another worker changed it or the pool was set back."""
        session = self._known.get(uid)
        if session is None:
            return None
        if not session.is_old and (self.stamps is None or session.stamp == self.stamps.of(uid)):
            return session
        self.drop(uid)
        return None

    def _loaded(self, uid: str, task: asyncio.Task[Session]) -> None:
        del self._loading[uid]
        if not task.cancelled():
            task.exception()  # callers get it from the task; where all have left, asyncio would log it as not retrieved

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

    def _sweep(self) -> None:
        """Forgets of a few sessions those that another worker ended or changed: nobody may ever ask for them here."""
        for _ in range(min(SWEPT_FOR_EACH, len(self._to_sweep))):
            uid, _ = self._to_sweep.popitem(last=False)
            session = self._known.get(uid)
            if session is not None and (session.busy or self._current(uid) is not None):
                self._to_sweep[uid] = None

    def _trim(self) -> None:
        """Forgets the least used, as many as are too many: it looks at no more than these and those in use."""
        tokens, sessions = self._tokens - self._most_tokens, len(self._known) - MAX_SESSIONS
        dropped: list[str] = []
        for uid, session in self._known.items():
            if tokens <= 0 and sessions <= 0:
                break
            if not session.busy:
                dropped.append(uid)
                tokens, sessions = tokens - session.tokens, sessions - 1
        for uid in dropped:
            self.drop(uid)


def _gone(error: Gone) -> Refusal:
    """The refusal of a call in a trajectory that is consumed, dropped or deleted."""
    return Refusal(f"{error}; begin another trajectory", 409, code="trajectory_complete")
