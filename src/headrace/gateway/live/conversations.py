"""The conversations of a live service, found by what a call contains or by a session's name.

A conversation is a trajectory and a group of its own. It is continued only by a call that contains an answer which was
given in it, within one tenant and one `user`, or by one that names its session or its last response. Everything here
can be read from the pool again (`PoolDiscovery`): what a process remembers only saves it asking.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from headrace.data.errors import HeadraceError
from headrace.data.trajectory import Trajectory
from headrace.gateway.access import Caller
from headrace.gateway.gateway import Gateway
from headrace.gateway.live.endings import IdleEndings
from headrace.gateway.live.index import (
    AnswerIndex,
    AnswerMatch,
    TextIndex,
    call_in,
    conversation_of,
    is_live,
    session_uid,
    tenant_prefix,
)
from headrace.gateway.request import CallRequest
from headrace.gateway.retries import ExpectedRetries, RetryMark
from headrace.gateway.sessions import TEXT_FIELD, Session
from headrace.gateway.turn import TextKey, Turn
from headrace.net.supervised import Supervised
from headrace.pool.embedded import DataPool
from headrace.pool.errors import Gone, NotFound
from headrace.tokens import RECORD, Conversation, Message, NodeRecord

log = logging.getLogger("headrace.gateway")

#: Where a conversation's metadata says which session it belongs to, and which part of it it is.
SESSION_FIELD, PART_FIELD = "session", "part"
#: Calls, and sessions, that are remembered for those who come again.
MAX_CALLS, MAX_NAMED_SESSIONS = 20_000, 100_000

#: Seconds that a call waits for the pool to say which conversations there are.
POOL_TIMEOUT_S = 5.0
#: Groups that are listed at a time.
PAGE_GROUPS = 1_000

#: Told of each running conversation: its name in the pool, and the trajectories that hold its steps, by model.
OnConversation = Callable[[str, list[Trajectory]], None]


class PoolDiscovery:
    """Finds conversations in the pool: those of a process that is gone, and those that other processes serve.

    A conversation is a group of its own, and groups have numbers that grow: each look reads only what came since the
    last, and what had no answer then.
    """

    def __init__(self, gateway: Gateway, found: OnConversation, known: Callable[[str], bool]) -> None:
        """`known`: conversations that need not be read."""
        self._gateway = gateway
        self._on_found = found
        self._known = known
        self._next: dict[str, int] = {}  # by channel, the number of the first group that is not listed yet
        self._silent: dict[str, None] = {}  # those that had no answer yet
        self._lock = asyncio.Lock()
        self._begun = 0  # looks that began
        self._finished = 0  # the number of the last that read everything
        self.done = False  # all that was there at the start is known

    async def look(self, again: Sequence[str] = ()) -> None:
        """Returns once everything is known that was in the pool when this was called, or the pool was too slow.
        Of those that are known, only `again` are read once more."""
        before = self._begun
        try:
            async with asyncio.timeout(POOL_TIMEOUT_S), self._lock:
                if self._finished <= before:  # otherwise another look began after this was called, and read everything
                    self._begun += 1
                    number = self._begun
                    await self._read()
                    self._finished = number
                for held in again:
                    await self._one(held)
        except TimeoutError:
            log.warning("the pool's conversations could not be read within %g s", POOL_TIMEOUT_S)
        except HeadraceError as error:
            log.warning("the pool's conversations could not be read: %s", error)

    async def complete(self) -> bool:
        """Whether all that was there at the start is known; if it was not, the pool is asked."""
        if not self.done:
            await self.look()
        return self.done

    async def _read(self) -> None:
        gateway = self._gateway
        await gateway.recorder.flushed()
        tenants = {tenant.channel(None) for tenant in gateway.access.tenants}
        for held in list(self._silent):
            if self._known(held):
                del self._silent[held]
            else:
                await self._one(held)
        for channel in {gateway.models.default.channel, *tenants}:
            more = True
            while more:
                page = await gateway.pool.aio.list_groups(channel, cursor=self._next.get(channel, 0), limit=PAGE_GROUPS)
                more = page["next"] is not None
                for row in page["items"]:
                    held = row["prompt_uid"]
                    if is_live(held) and not row["complete"] and not self._known(held):
                        await self._one(held)
                    self._next[channel] = row["seq"] + 1
        self.done = True

    async def _one(self, held: str) -> None:
        self._silent.pop(held, None)
        found: list[Trajectory] = []
        for model in self._gateway.models:
            try:
                found.append(await self._gateway.pool.aio.trajectory(model.uid_of(held)))
            except NotFound:
                continue
        if not any(map(len, found)):
            if found:
                self._silent[held] = None
            return
        if not found[0].complete:
            self._on_found(held, found)


class LiveConversations:
    """What one gateway knows of the conversations of its live service. `held` is a conversation's name in the pool,
    with its tenant's in front."""

    def __init__(self, gateway: Gateway, clock: Callable[[], float] = time.monotonic) -> None:
        self.gateway = gateway
        self.endings = IdleEndings(gateway, gateway.settings.session_idle_s, clock)
        self._answers = AnswerIndex()
        self._texts = TextIndex()
        self._discovery = PoolDiscovery(gateway, self._adopt, lambda held: held in self._answers)
        self._shared = not isinstance(gateway.pool, DataPool)
        self._parts: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._tries: OrderedDict[str, list[str]] = OrderedDict()
        self.expected = ExpectedRetries(MAX_CALLS)
        self.timer = Supervised("the timer of live conversations", lambda: self.endings.run(self._discovery.complete))
        gateway.supervised.append(self.timer)
        gateway.dropping = self._dropped

    async def start(self) -> None:
        """Begins to end conversations that are idle."""
        self.timer.start()

    async def close(self) -> None:
        """Stops ending them; none is lost: another process, or the next start, finds them in the pool."""
        await self.timer.stop()

    # -- finding -------------------------------------------------------------------------------------------------------

    async def continued(self, caller: Caller, request: CallRequest, *, recorded: bool) -> str | None:
        """The pool's name of the conversation whose answer a call contains. One that is `recorded` continues it."""
        if request.conversation is not None and all(
            message.role != "assistant" for message in request.conversation.messages
        ):
            return None
        scope = _scope(caller.uid(""), request.user)
        found = self._find(scope, request)
        doubtful = found is None or not found.last or found.answer.continued
        if doubtful and (self._shared or not self._discovery.done):
            # Perhaps another process gave the answers that follow, or has one that is alike and nobody continued.
            await self._discovery.look(found.alike if found is not None and len(found.alike) > 1 else ())
            found = self._find(scope, request)
        if found is None:
            return None
        found.answer.continued |= recorded
        return found.answer.uid

    def _find(self, scope: str, request: CallRequest) -> AnswerMatch | None:
        if request.conversation is not None:
            return self._answers.find(scope, request.conversation)
        if len(request.prompts) != 1 or not isinstance(request.prompts[0], str):
            return None
        return self._answers.find_text(scope, self._texts.known(scope, request.prompts[0]))

    async def named(self, caller: Caller, name: str) -> tuple[str, int, bool]:
        """The part of a session that is running, or the next one: its uid, its number, and whether it is there."""
        key = (caller.uid(""), name)
        part = self._parts.get(key, 1)
        while True:
            uid = session_uid(name, part)
            there = await self.running(caller.uid(uid))
            if there is not None:
                self._parts[key] = part
                self._parts.move_to_end(key)
                if len(self._parts) > MAX_NAMED_SESSIONS:
                    self._parts.popitem(last=False)
                return uid, part, there
            part += 1

    async def running(self, held: str) -> bool | None:
        """Whether a conversation is there; None where it has ended."""
        if self.endings.is_ending(held):
            return None
        try:
            session = await self.gateway.sessions.find(held)
        except Gone:
            return None
        except NotFound:
            return False
        return None if session.complete else True

    async def unfold(self, request: CallRequest, held: str) -> None:
        """Writes out the conversation that a call goes on with by the name of an answer, where that one has ended: it
        goes on in another, as if its client had sent all of it. What is gone stays unknown, and is refused as such."""
        if request.previous is None or request.conversation is None:
            return
        try:
            ended = await self.gateway.sessions.find(held)
        except NotFound:
            return
        earlier = ended.stored.messages(request.previous)
        if earlier is not None:
            given = request.conversation
            messages = (*given.messages[: request.opening], *earlier, *given.messages[request.opening :])
            request.conversation, request.previous = Conversation(messages, given.tools, given.options), None

    async def refer(self, request: CallRequest, caller: Caller, held: str) -> None:
        """Finds what a call of the conversation `held` refers to in others: it went on from those as they ended."""
        if request.references is None:
            return
        known: dict[str, Message] = {}
        for call in request.references.calls:
            other = None if call_in(call) is None else caller.uid(conversation_of(call))
            if other is not None and other != held:
                try:
                    known |= (await self.gateway.sessions.find(other)).stored.answers([call])
                except NotFound:
                    continue  # what is gone stays unknown, and is refused as such
        request.references = replace(request.references, known=known)

    def tried(self, digest: str, mark: RetryMark) -> str | None:
        """The conversation of the call that this one repeats, as far as this process knows."""
        if not mark.repeats:
            return None
        retry = self.expected.take(digest, mark.count) if mark.key is None else None
        if retry is not None:
            return retry.answer
        known = self._tries.get(digest, [])
        return known[0] if len(known) == 1 or (known and mark.key is not None) else None

    # -- beginning and going on ----------------------------------------------------------------------------------------

    async def begin(self, caller: Caller, uid: str, metadata: dict[str, Any] | None = None) -> None:
        """Opens a new conversation in the pool."""
        gateway, held = self.gateway, caller.uid(uid)
        channel = caller.channel(None, gateway.models.default.channel)
        await gateway.pool.aio.open(held, held, channel, metadata, 1)
        gateway.sessions.add(Session(held, held, channel))
        gateway.counters.add("conversations", "begun")

    def remember(self, digest: str, held: str) -> None:
        """Notes where a call went, for a client that makes it again."""
        known = self._tries.setdefault(digest, [])
        if held not in known and len(known) < 2:  # of equal calls, it matters only that there are others
            known.append(held)
        if len(self._tries) > MAX_CALLS:
            self._tries.popitem(last=False)

    def failed(self, digest: str, mark: RetryMark, held: str) -> None:
        """A call that began a conversation was not answered: its retry begins another."""
        if held in self._tries.get(digest, []):
            self._tries[digest].remove(held)
        self.expected.add(digest, mark.count)

    def answered(self, held: str, turns: list[Turn]) -> None:
        """Enters a call's answers into the index, so that the next call is found to continue them."""
        for turn in turns:
            conversation = turn.request.conversation
            scope = _scope(tenant_prefix(held), turn.request.user)
            if conversation is None:
                for key in turn.text_keys:
                    self._add_text(held, scope, key)
                continue
            for choice in turn.choices:
                answer = choice.message()
                self._answers.add(held, scope, *conversation.chain.answer(answer))

    def _adopt(self, held: str, found: list[Trajectory]) -> None:
        """A running conversation of another process, or of one that is gone."""
        if not self._discovery.done:
            self.endings.watch(held)
        extras = [r.head.unpack_extra().metadata for each in found for r in each.tree.records.values()]
        records = [(NodeRecord.from_metadata(about.get(RECORD)), about) for about in extras]
        parents = {record.parent for record, _ in records if record is not None}
        for record, about in records:
            scope, text = _scope(tenant_prefix(held), about.get("user")), TextKey.from_metadata(about.get(TEXT_FIELD))
            if text is not None:
                self._add_text(held, scope, text)
            elif record is not None:
                continued = record.key in parents
                self._answers.add(held, scope, record.key, record.strict, record.named, continued=continued)
        named = found[0].metadata
        if isinstance(named.get(SESSION_FIELD), str) and isinstance(named.get(PART_FIELD), int):
            self._parts[tenant_prefix(held), named[SESSION_FIELD]] = named[PART_FIELD]

    def _add_text(self, held: str, scope: str, key: TextKey) -> None:
        self._texts.add(scope, key)
        self._answers.add(held, scope, bytes.fromhex(key.digest), b"")

    def _dropped(self, held: str) -> None:
        self.endings.drop(held)
        self._answers.drop(held)


def _scope(tenant: str, user: object) -> str:
    """Within which answers are looked up: two users' conversations are never one, however alike."""
    return f"{tenant}\0{user if isinstance(user, str) else ''}\0"
