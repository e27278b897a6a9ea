"""One LLM call over HTTP, in whichever dialect: from the request to the last byte of its answer.

An error before the first token has a status of its own; after it, it is the stream's last event. A stream that is
silent (a long prompt, a paused gateway) gets comments, so that no client gives up on it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from headrace.connections import delivered
from headrace.data.errors import HeadraceError
from headrace.gateway import replay
from headrace.gateway.access import Caller
from headrace.gateway.ask import Ask
from headrace.gateway.dialects import AnswerEvents, Dialect
from headrace.gateway.errors import Refusal, refusal, too_deep
from headrace.gateway.gateway import Gateway
from headrace.gateway.models.served_model import ServedModel
from headrace.gateway.places import Place
from headrace.gateway.presence import HungUp, Presence
from headrace.gateway.responses import json_response, retry_header
from headrace.gateway.sending import Sending
from headrace.gateway.session import Session
from headrace.gateway.tries import Call, Debts, Mark
from headrace.gateway.turn import Turn, completion_tokens, prompt_tokens
from headrace.tokens import AnswerDelta

log = logging.getLogger("headrace.gateway")

CALL_HEADER, VERSION_HEADER = "x-headrace-call", "x-headrace-policy-version"
#: `off`: this call is answered, and makes no step.
RECORD_HEADER = "x-headrace-record"


class Exchange:
    """One call: an ASGI application, so that it holds the connection from its first byte to its last."""

    def __init__(
        self,
        gateway: Gateway,
        dialect: Dialect,
        route: str,
        request: Request,
        caller: Caller,
        place: Place,
    ) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._route = route
        self._request = request
        self._caller = caller
        self._place = place
        self._call_id = uuid.uuid4().hex
        self._began = time.monotonic()
        self._mark = Mark.of(request)
        self._events: AnswerEvents | None = None  # once the answer is to be a stream
        self._answered: tuple[Debts, str, str] | None = None  # once there is one: its digest and its call's id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        sending = Sending(send, gateway.settings.keep_alive_s, gateway.settings.idle_s)
        try:
            with self._caller.admitted(), gateway.admitted():
                body = await gateway.body(self._request, self._caller)
                async with Presence(receive) as presence:
                    await self._answer(body, presence, sending)
            status = 200
        except HungUp:
            gateway.counters.add("unrecorded", "agent_left")
            status = 499
        except ClientDisconnect:
            status = 499
        except HeadraceError as error:
            status = await self._refuse(error, sending)
        except RecursionError:
            status = await self._refuse(too_deep(), sending)
        except Exception as error:
            log.exception("a call failed")
            status = await self._refuse(
                Refusal(f"the gateway failed at this call ({type(error).__name__})", 500), sending
            )
        finally:
            sending.close()
        await self._check_heard(scope, answered=status == 200)
        gateway.counters.add("calls", self._route, str(status))
        gateway.counters.took(time.monotonic() - self._began)

    async def _check_heard(self, scope: Scope, *, answered: bool) -> None:
        """Where an answer that is recorded did not reach its client, its retry gets it."""
        if self._answered is None:
            return
        try:
            async with asyncio.timeout(self._gateway.settings.idle_s):
                heard = answered and await delivered(scope)
        except TimeoutError:
            heard = False
        if not heard:
            debts, digest, call_id = self._answered
            debts.owe(digest, self._mark.count, call_id)
            self._place.unheard()

    async def _refuse(self, error: HeadraceError, sending: Sending) -> int:
        refused = refusal(error)
        if refused.status >= 500:
            self._gateway.counters.add("unrecorded", error.code)
        if sending.begun and self._events is not None:
            await sending.last(self._events.error(refused))
        elif sending.begun:
            log.warning("an answer was cut off: %s", refused)  # the connection ends with it, so that the agent notices
        else:
            headers = {**self._dialect.headers(self._call_id), **retry_header(refused)}
            await sending.whole(json_response(self._dialect.error(refused), refused.status, headers))
        return refused.status

    async def _answer(self, body: bytes, presence: Presence, sending: Sending) -> None:
        gateway = self._gateway
        provider = gateway.models.provider(body)
        if provider is not None:
            gateway.counters.add("passed", provider.name)
            await provider.forward(self._request.headers, self._rest(), body, sending)
        else:
            await self._take(body, presence, sending)

    async def _take(self, body: bytes, presence: Presence, sending: Sending) -> None:
        """A call to a model that is recorded."""
        gateway = self._gateway
        ask, digest = await gateway.reading.call(body, self._dialect.read, self._mark.digest)
        policy = gateway.models.called(ask.model)
        calls = policy.calls  # raises while the tokenizer loads
        calls.planner.settle(ask)
        recorded = _is_recorded(self._request)
        try:
            session = await self._place.session(ask, policy, digest, recorded=recorded)
            self._call_id = self._place.call_id(self._call_id)
            with gateway.sessions.using(session):
                await self._in(session, policy, ask, digest, presence, sending, recorded=recorded)
        finally:
            await self._place.left()

    async def _in(
        self,
        session: Session,
        policy: ServedModel,
        ask: Ask,
        digest: str,
        presence: Presence,
        sending: Sending,
        *,
        recorded: bool,
    ) -> None:
        """Answers a call of a session."""
        gateway, calls = self._gateway, policy.calls
        if not recorded:
            turns = await calls.planner.turns(session, ask, self._call_id, digest, policy.upstream.max_model_len)
            gateway.counters.add("unrecorded", "asked_for")
            await self._carried_out(policy, None, None, turns, presence, sending)
            return
        if self._mark.repeats:
            again = await replay.earlier(calls.planner, gateway.sessions, session, ask, self._mark, digest)
            if again is not None:
                gateway.counters.add("replayed")
                self._answered = session.tries.debts, digest, _call_of(again)
                await self._again(again, sending)
                return
        with session.tries.under_way(digest, self._mark.count) as call:
            turns = await calls.planner.turns(session, ask, self._call_id, digest, policy.upstream.max_model_len)
            await self._carried_out(policy, session, call, turns, presence, sending)

    async def _carried_out(
        self,
        policy: ServedModel,
        session: Session | None,
        call: Call | None,
        turns: list[Turn],
        presence: Presence,
        sending: Sending,
    ) -> None:
        """Samples and answers; without a session and its call, nothing is recorded."""
        calls = policy.calls
        if turns[0].ask.stream:
            await self._streamed(policy, session, call, turns, presence, sending)
            return
        await calls.sample(turns)
        presence.settle()
        self._caller.used(prompt_tokens(turns), completion_tokens(turns))
        await self._record(policy, session, call, turns)
        await sending.whole(json_response(self._dialect.whole(turns), 200, self._headers(turns)))

    async def _record(self, policy: ServedModel, session: Session | None, call: Call | None, turns: list[Turn]) -> None:
        """Hands the steps over; from here on the answer is there for whoever asks again."""
        if session is not None and call is not None:
            await policy.calls.record(session, turns)
            session.tries.answered(call, turns)
            self._answered = session.tries.debts, call.digest, self._call_id
            self._place.answered(turns)

    async def _streamed(
        self,
        policy: ServedModel,
        session: Session | None,
        call: Call | None,
        turns: list[Turn],
        presence: Presence,
        sending: Sending,
    ) -> None:
        calls = policy.calls
        events = self._events = self._dialect.events(turns)
        sending.expect(self._headers(turns, policy.upstream.version))
        opened = False
        async with aclosing(calls.stream(turns)) as pieces:
            async for turn, choice, delta, piece in pieces:
                if not opened:
                    opened = True
                    await sending.event(events.opening())
                await sending.event(events.delta(turn, choice, delta, piece))
        presence.settle()
        self._caller.used(prompt_tokens(turns), completion_tokens(turns))
        await self._record(policy, session, call, turns)
        await sending.last(events.closing())

    async def _again(self, turns: list[Turn], sending: Sending) -> None:
        """An answer that is there already."""
        if not turns[0].ask.stream:
            await sending.whole(json_response(self._dialect.whole(turns), 200, self._headers(turns)))
            return
        events = self._events = self._dialect.events(turns)
        sending.expect(self._headers(turns))
        await sending.event(events.opening())
        for turn in turns:
            for choice in turn.choices:
                message = choice.message(one_call=turn.ask.one_call)
                delta = AnswerDelta(message.content, message.reasoning or "", message.tool_calls)
                await sending.event(events.delta(turn, choice, delta, replay.whole(choice)))
        await sending.last(events.closing())

    def _rest(self) -> str:
        """The call's path behind its base URL, as it was sent."""
        scope = self._request.scope
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope.get("query_string", b"")
        return (raw.split(b"/", self._place.depth + 1)[-1] + (b"?" + query if query else b"")).decode("latin-1")

    def _headers(self, turns: list[Turn], version: int | None = None) -> dict[str, str]:
        """`version` is the one that is about to sample, where nothing is sampled yet."""
        call_id = turns[0].call_id
        told = min(turn.version for turn in turns) if version is None else version
        return {CALL_HEADER: call_id, VERSION_HEADER: str(told), **self._dialect.headers(call_id)}


def _call_of(turns: list[Turn]) -> str:
    """The id of the call that made them."""
    return turns[0].call_id if len(turns) == 1 else turns[0].call_id.removesuffix("-0")


def _is_recorded(request: Request) -> bool:
    """Whether a call is to make steps: all do, but those whose agent asks for none."""
    said = request.headers.get(RECORD_HEADER, "on")
    if said not in ("on", "off"):
        raise Refusal(f"{RECORD_HEADER} is {said!r}; it must be on or off", 400, code="invalid_header")
    return said == "on"
