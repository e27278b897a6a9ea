"""`DiscoveredConversation`: the target of one call under root `/v1`, found by what the call contains or names."""

from __future__ import annotations

from starlette.requests import Request

from headrace.gateway.access import Caller
from headrace.gateway.errors import Refusal
from headrace.gateway.live.conversations import PART_FIELD, SESSION_FIELD, LiveConversations
from headrace.gateway.live.index import call_in, check_session_name, conversation_of, new_call_id, new_conversation_uid
from headrace.gateway.request import CallRequest
from headrace.gateway.retries import RetryMark
from headrace.gateway.served_model import ServedModel
from headrace.gateway.sessions import Session
from headrace.gateway.turn import Turn

#: Names a conversation, where what it contains should not decide.
SESSION_HEADER = "x-headrace-session"
#: Times that a conversation which ends just now is looked for anew, before the call is refused.
MAX_ATTEMPTS = 5


class DiscoveredConversation:
    """A `CallTarget`; the conversation does not end while the call is under way."""

    path_depth = 0

    def __init__(self, live: LiveConversations, caller: Caller, request: Request) -> None:
        self._live = live
        self._caller = caller
        self._name = _session_name(request)
        self._mark = RetryMark.of(request)
        self._first = ""  # what its retries have in common with it
        self._held: str | None = None
        self._uid = ""
        self._tried: str | None = None  # the conversation that it is a retry in
        self._begun = False
        self._answered = False

    async def session(self, request: CallRequest, model: ServedModel, digest: str, *, recorded: bool) -> Session:
        gateway, caller = self._live.gateway, self._caller
        for _ in range(MAX_ATTEMPTS):
            uid = await self._uid_of(request, digest, begin=recorded)
            if uid is None:
                return Session(new_conversation_uid(), "", caller.channel(None, gateway.models.default.channel))
            held = caller.uid(uid)
            self._enter(uid, held)
            try:
                await self._live.refer(request, caller, held)
                return await gateway.session(caller, uid, uid, model, recorded=recorded)
            except Refusal as error:
                if error.reason != "trajectory_complete":
                    raise
            self._leave()
            await gateway.forget(held)  # it ended meanwhile, and another begins
        raise Refusal("the conversation ends as often as it is begun; try again", 503, code="ending", retry_after=1)

    async def _uid_of(self, request: CallRequest, digest: str, *, begin: bool) -> str | None:
        """The conversation's uid; without `begin`, None where there is none yet."""
        live, caller = self._live, self._caller
        if self._name is not None:
            uid, part, begun = await live.named(caller, self._name)
            if not begun and begin:
                await live.begin(caller, uid, {SESSION_FIELD: self._name, PART_FIELD: part})
            return uid if begun or begin else None
        scope = caller.uid("")
        if not self._first:
            self._first = digest + scope
            self._tried = live.tried(self._first, self._mark)
        held = self._tried or await self._continued(request, recorded=begin)
        there = False if held is None else await live.running(held)
        if held is not None and there:
            uid = held.removeprefix(scope)
        elif begin:
            if held is not None and there is None:
                await live.unfold(request, held)
            uid = new_conversation_uid()
            await live.begin(caller, uid)
            self._begun = True
        else:
            return None
        live.remember(self._first, caller.uid(uid))
        return uid

    async def _continued(self, request: CallRequest, *, recorded: bool) -> str | None:
        if request.named is not None:
            call = call_in(request.named)
            return None if call is None else self._caller.uid(conversation_of(call))
        return await self._live.continued(self._caller, request, recorded=recorded)

    def call_id(self, given: str) -> str:
        return new_call_id(self._uid, given) if self._held is not None else given

    def answered(self, turns: list[Turn]) -> None:
        assert self._held is not None
        self._answered = True
        self._live.answered(self._held, turns)

    async def close(self) -> None:
        held, empty = self._held, self._begun and not self._answered
        self._leave()
        if empty:
            self._live.failed(self._first, self._mark, self._caller.uid(self._uid))
        if held is not None and empty:
            await self._live.endings.abandon(held)

    def undelivered(self) -> None:
        if self._first:
            self._live.expected.add(self._first, self._mark.count, self._caller.uid(self._uid))

    def _enter(self, uid: str, held: str) -> None:
        self._uid, self._held = uid, held
        self._live.endings.enter(held)

    def _leave(self) -> None:
        if self._held is not None:
            self._live.endings.leave(self._held)
            self._held = None


def _session_name(request: Request) -> str | None:
    given = request.headers.getlist(SESSION_HEADER)
    if len(given) > 1:
        raise Refusal(f"{SESSION_HEADER} is given {len(given)} times; give it once", 400, code="invalid_header")
    return check_session_name(given[0]) if given else None
