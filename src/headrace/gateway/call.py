"""One LLM call over HTTP, in whichever dialect: from the request to the last byte of its answer.

An error before the first token has a status of its own; after it, it is the stream's last event. A stream that is
silent (a long prompt, a paused gateway) gets comments, so that no client gives up on it. What a client sees answered
was handed to the recorder before.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from headrace.data.errors import HeadraceError
from headrace.gateway import replay
from headrace.gateway.access import Caller
from headrace.gateway.admission import AdmittedCall
from headrace.gateway.dialects import AnswerEvents, CountingDialect, Dialect
from headrace.gateway.errors import Refusal, answered_elsewhere, refusal, too_deep
from headrace.gateway.executor import CallExecutor, StreamedPiece
from headrace.gateway.gateway import Gateway
from headrace.gateway.http import (
    BegunCoroutine,
    ClientGone,
    DisconnectWatch,
    ResponseWriter,
    json_response,
    retry_header,
)
from headrace.gateway.request import CallRequest
from headrace.gateway.retries import ExpectedRetries, RetryMark, RunningCall
from headrace.gateway.served_model import ServedModel
from headrace.gateway.sessions import Session
from headrace.gateway.turn import Turn, completion_tokens, digest_of, named_call_id, prompt_tokens
from headrace.gateway.upstream.streamed import HandOn
from headrace.net.connection import delivered, hang_up
from headrace.net.server import header
from headrace.pool.errors import Conflict

log = logging.getLogger("headrace.gateway")

CALL_HEADER, VERSION_HEADER = "x-headrace-call", "x-headrace-policy-version"
#: `off`: this call is answered, and makes no step.
RECORD_HEADER = b"x-headrace-record"
#: What the agent misses in this answer although it asked for it.
WARNING_HEADER = "x-headrace-warning"


class CallTarget(Protocol):
    """The trajectory that one call belongs to: named by the call's path, or discovered among those of a live service.
    A target is made for one call; whoever carries the call out need not know which kind it is."""

    #: How many segments of the path are in front of what the dialect's vendor calls it.
    path_depth: int

    async def session(self, request: CallRequest, model: ServedModel, digest: str, *, recorded: bool) -> Session:
        """What is known of the trajectory's calls to the model; `Refusal` where there is no such trajectory."""
        ...

    def call_id(self, given: str) -> str:
        """The call's id, once its session is found; `given` is unique."""
        ...

    def answered(self, turns: list[Turn]) -> None:
        """The call's steps are handed over, and the end of its answer is sent next."""
        ...

    async def close(self) -> None:
        """The call is over, however it ended."""
        ...

    def undelivered(self) -> None:
        """The call's answer did not reach its client, which may ask again."""
        ...


class NamedTrajectory:
    """The trajectory that a path names. Nothing has to be remembered of its calls: a retry names it again."""

    path_depth = 2

    def __init__(self, gateway: Gateway, caller: Caller, uid: str, prompt: str) -> None:
        self._gateway = gateway
        self._caller = caller
        self._uid = uid
        self._prompt = prompt

    async def session(self, request: CallRequest, model: ServedModel, digest: str, *, recorded: bool) -> Session:
        return await self._gateway.session(self._caller, self._uid, self._prompt, model, recorded=recorded)

    def call_id(self, given: str) -> str:
        return given

    def answered(self, turns: list[Turn]) -> None:
        pass

    async def close(self) -> None:
        pass

    def undelivered(self) -> None:
        pass


class Call:
    """One call: an ASGI application, so that it holds the connection from its first byte to its last."""

    _writer: ResponseWriter
    _held: AdmittedCall
    _watch: DisconnectWatch

    def __init__(
        self,
        gateway: Gateway,
        dialect: Dialect,
        route: str,
        request: Request,
        caller: Caller,
        target: CallTarget,
    ) -> None:
        """`route` is what counters call it."""
        self._gateway = gateway
        self._dialect = dialect
        self._route = route
        self._request = request
        self._caller = caller
        self._target = target
        self._call_id = os.urandom(16).hex()
        self._began = time.monotonic()
        self._mark = RetryMark.of(request)
        self._events: AnswerEvents | None = None  # once the answer is to be a stream
        self._opened = False  # whether the events before the first token's are written
        self._sampling: list[Turn] = []  # what is being sampled; empty before, and once it is recorded
        self._recording: tuple[Session, RunningCall] | None = None  # where its steps go; None: they are not recorded
        self._answered: tuple[ExpectedRetries, str, str] | None = None  # once there is one: its digest, its call's id
        self._warning: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        keep_alive_s, idle_s = gateway.settings.keep_alive_s, gateway.settings.idle_s
        writer = self._writer = ResponseWriter(send, keep_alive_s, idle_s, gateway.admission.stall)
        try:
            with self._caller.admitted(), gateway.admission.call() as self._held:
                body = await gateway.body(self._request, self._caller, held=self._held)
                async with DisconnectWatch(receive) as self._watch:
                    await self._answer(body)
            status = 200
        except ClientGone:
            if self._answered is None:
                gateway.counters.add("unrecorded", "agent_left")
            self._charge(self._sampling)
            await hang_up(scope)  # where it is there and does not read, closing would wait for it
            status = 499
        except ClientDisconnect:
            status = 499
        except HeadraceError as error:
            status = await self._refuse(error)
        except RecursionError:
            status = await self._refuse(too_deep())
        except Exception as error:
            log.exception("a call failed")
            status = await self._refuse(Refusal(f"the gateway failed at this call ({type(error).__name__})", 500))
        finally:
            writer.close()
        await self._check_delivered(scope, answered=status == 200)
        gateway.counters.add("calls", self._route, str(status))
        gateway.counters.took(time.monotonic() - self._began)

    async def _check_delivered(self, scope: Scope, *, answered: bool) -> None:
        """Where an answer that is recorded did not reach its client, its retry gets it."""
        if self._answered is None:
            return
        if not (answered and await self._arrived(scope)):
            expected, digest, call_id = self._answered
            expected.add(digest, self._mark.count, call_id)
            self._target.undelivered()

    async def _arrived(self, scope: Scope) -> bool:
        """Whether the client has the whole answer; it may take `idle_s` to read it."""
        telling = delivered(scope)
        try:
            waits_for = telling.send(None)
        except StopIteration as done:  # the system took it at once, as it does while the client reads
            return bool(done.value)
        try:
            async with asyncio.timeout(self._gateway.settings.idle_s) as limit:
                with self._gateway.admission.stall(limit):
                    return await BegunCoroutine(telling, waits_for)
        except TimeoutError:
            await hang_up(scope)
            return False

    async def _refuse(self, error: HeadraceError) -> int:
        """Sends an error, as far as the answer has not begun; its status."""
        refused, writer = refusal(error), self._writer
        if refused.status >= 500:
            self._gateway.counters.add("unrecorded", error.code)
        if writer.begun and self._events is not None:
            await writer.last(self._events.error(refused))
        elif writer.begun:
            log.warning("an answer was cut off: %s", refused)  # the connection ends with it, so that the agent notices
        else:
            headers = {**self._dialect.headers(self._call_id), **retry_header(refused)}
            await writer.whole(json_response(self._dialect.error(refused), refused.status, headers))
        return refused.status

    async def _answer(self, body: bytes) -> None:
        gateway = self._gateway
        provider = gateway.models.provider(body)
        if provider is not None:
            gateway.counters.add("passed", provider.name)
            await provider.forward(self._request.headers, self._vendor_path(), body, self._writer)
        else:
            await self._answer_recorded_model(body)

    async def _answer_recorded_model(self, body: bytes) -> None:
        """A call to a model whose calls are recorded, and not passed on to a provider."""
        gateway = self._gateway
        request, digest = await gateway.reader.read(body, self._dialect.read, self._mark.digest)
        model = gateway.models.resolve(request.model)
        executor = model.calls  # raises while the tokenizer loads
        executor.planner.apply_thinking(request)
        if request.allow_tool_calls:
            self._warning = model.tools_offered()
        recorded = _is_recorded(self._request)
        try:
            async with self._alone(digest):
                session = await self._target.session(request, model, digest, recorded=recorded)
                if recorded and self._is_named:
                    self._call_id = named_call_id(session.uid, digest)
                self._call_id = self._target.call_id(self._call_id)
                with gateway.sessions.using(session):
                    await self._answer_in(session, model, executor, request, digest, recorded=recorded)
        finally:
            await self._target.close()

    @property
    def _is_named(self) -> bool:
        """Whether its tries are one call, by the name that their client gave them, wherever they are carried out: the
        pool is asked before any of them is answered, and takes the steps of one."""
        return self._mark.key is not None and self._gateway.recorder.waits_for_pool

    def _alone(self, digest: str) -> AbstractAsyncContextManager[None]:
        """While no other worker carries out the same call, where it has a name to know it by."""
        named_calls, tenant = self._gateway.named_calls, self._caller.tenant
        if named_calls is None or self._mark.key is None:
            return nullcontext()
        return named_calls.alone(tenant.name if tenant is not None else "", self._request.scope["path"], digest)

    async def _answer_in(
        self,
        session: Session,
        model: ServedModel,
        executor: CallExecutor,
        request: CallRequest,
        digest: str,
        *,
        recorded: bool,
    ) -> None:
        """Answers a call of a session: with what its first try was answered, or with what is sampled now."""
        gateway, planner, context = self._gateway, executor.planner, model.upstream.max_model_len
        if not recorded:
            turns = await planner.turns(session, request, self._call_id, digest, context)
            gateway.counters.add("unrecorded", "asked_for")
            await self._sample(session, model, executor, turns)
            return
        if self._mark.repeats:
            again = await replay.earlier_answer(planner, gateway.sessions, session, request, self._mark, digest)
            if again is not None:
                gateway.counters.add("replayed")
                self._answered = session.retries.expected, digest, _call_of(again)
                await self._replay(again)
                return
        with session.retries.under_way(digest, self._mark.count) as running:
            self._recording = session, running
            turns = await planner.turns(session, request, self._call_id, digest, context)
            await self._sample(session, model, executor, turns)

    async def _sample(self, session: Session, model: ServedModel, executor: CallExecutor, turns: list[Turn]) -> None:
        """Samples, records and answers, in one piece or as a stream."""
        self._sampling = turns
        if turns[0].request.stream:
            await self._stream(model, executor, turns, self._gateway.flush_times.seconds(session.channel))
            return
        await executor.sample(turns)
        await self._record(executor, turns)
        await self._writer.whole_json(self._dialect.whole(turns), self._headers(turns))

    async def _stream(self, model: ServedModel, executor: CallExecutor, turns: list[Turn], flush_s: float) -> None:
        events = self._events = self._dialect.events(turns)
        self._writer.expect(self._headers(turns, model.upstream.version))
        await executor.stream(turns, self._show, flush_s)
        await self._record(executor, turns)
        await self._writer.last(events.closing())

    def _show(self, new: list[StreamedPiece]) -> HandOn | None:
        """How what is new of an answer is written to a stream."""
        events = self._events
        assert events is not None
        data = b"" if self._opened else events.opening()
        self._opened = True
        for turn, choice, delta, piece in new:
            data += events.delta(turn, choice, delta, piece)
        if not data:
            return None
        self._held.answer(len(data))
        return partial(self._writer.event, data)

    async def _record(self, executor: CallExecutor, turns: list[Turn]) -> None:
        """Hands the steps over, whoever still listens; from here on the answer is there for whoever asks again."""
        self._watch.settle()
        self._sampling = []
        self._charge(turns)
        if self._recording is not None:
            session, running = self._recording
            try:
                await executor.record(session, turns, named=self._is_named)
            except Conflict:
                self._gateway.sessions.drop(session.uid)  # which has this answer
                raise answered_elsewhere() from None
            session.retries.answered(running, turns)
            self._answered = session.retries.expected, running.digest, self._call_id
            self._target.answered(turns)

    def _charge(self, turns: list[Turn]) -> None:
        """Counts what was sampled, all of it or up to where its client left."""
        if turns:
            self._caller.used(prompt_tokens(turns), completion_tokens(turns))

    async def _replay(self, turns: list[Turn]) -> None:
        """Sends an answer that is there already."""
        writer = self._writer
        if not turns[0].request.stream:
            await writer.whole(json_response(self._dialect.whole(turns), 200, self._headers(turns)))
            return
        events = self._events = self._dialect.events(turns)
        writer.expect(self._headers(turns))
        data = events.opening()
        for turn in turns:
            for choice in turn.choices:
                data += events.delta(turn, choice, choice.whole(), replay.whole_piece(choice))
        await writer.last(data + events.closing())

    def _vendor_path(self) -> str:
        """The call's path behind its base URL, as it was sent."""
        scope = self._request.scope
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope.get("query_string", b"")
        rest = raw.split(b"/", self._target.path_depth + 1)[-1]
        return (rest + (b"?" + query if query else b"")).decode("latin-1")

    def _headers(self, turns: list[Turn], version: int | None = None) -> dict[str, str]:
        """`version` is the one that is about to sample, where nothing is sampled yet."""
        call_id = turns[0].call_id
        told = min(turn.version for turn in turns) if version is None else version
        headers = {CALL_HEADER: call_id, VERSION_HEADER: str(told), **self._dialect.headers(call_id)}
        if self._warning is not None:
            headers[WARNING_HEADER] = " ".join(self._warning.encode("ascii", "backslashreplace").decode().split())
        return headers


class CountTokensCall(Call):
    """A call that only asks how many tokens its prompt would have, if it is made next. Nothing is sampled, and nothing
    recorded."""

    def __init__(
        self,
        gateway: Gateway,
        dialect: CountingDialect,
        route: str,
        request: Request,
        caller: Caller,
        target: CallTarget,
    ) -> None:
        super().__init__(gateway, dialect, route, request, caller, target)
        self._counter = dialect

    async def _answer_recorded_model(self, body: bytes) -> None:
        gateway, dialect = self._gateway, self._counter
        request, digest = await gateway.reader.read(body, dialect.read_count, digest_of)
        model = gateway.models.resolve(request.model)
        planner = model.calls.planner
        planner.apply_thinking(request)
        try:
            session = await self._target.session(request, model, digest, recorded=False)
            with gateway.sessions.using(session):
                tokens = await planner.length(session, request)
        finally:
            await self._target.close()
        await self._writer.whole(json_response(dialect.counted(tokens), 200, dialect.headers(self._call_id)))


def _call_of(turns: list[Turn]) -> str:
    """The id of the call that made them."""
    return turns[0].call_id if len(turns) == 1 else turns[0].call_id.removesuffix("-0")


def _is_recorded(request: Request) -> bool:
    """Whether a call is to make steps: all do, but those whose agent asks for none."""
    said = header(request, RECORD_HEADER)
    if said is None:
        return True
    if said not in ("on", "off"):
        raise Refusal(f"{RECORD_HEADER.decode()} is {said!r}; it must be on or off", 400, code="invalid_header")
    return said == "on"
