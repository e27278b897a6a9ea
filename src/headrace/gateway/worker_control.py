"""Several gateway processes as one: what changes or tells all of them is asked of each, and their answers are joined.

The parent holds the `WorkerControl`. A worker sends what concerns all of them there (`ControlRelay`); it goes to each
worker's own address, with a secret that only they share. What was changed is remembered, for a worker that has to be
started anew.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.gateway.errors import Refusal
from headrace.gateway.http import refusal_response
from headrace.net.async_client import AsyncHttpClient
from headrace.net.exposition import joined_by_worker
from headrace.net.http_answer import NoAnswer
from headrace.net.server import BodyTooLarge, read_body

SECRET_HEADER = "x-headrace-hub"
#: Beside the secret: the parent asks for itself, and needs no key.
TRUSTED_HEADER = "x-headrace-trusted"
#: What workers tell each other: a session that must be read from the pool again.
DROP_SESSION = "/sessions/drop"
#: Routes whose answer is about all workers, or must reach all of them.
SHARED_ROUTES = frozenset(
    {"/health", "/ready", "/policy_version", "/pause", "/resume", "/servers", "/stats", "/metrics", DROP_SESSION}
)
#: Bytes of a body that goes to all of them, which is read before anybody has looked at a key.
MAX_BODY_BYTES = 1_000_000
#: Seconds that a worker may take: a drain waits for calls under way.
WORKER_TIMEOUT_S = 3600
#: Seconds that it may take to forget a session, which takes no time: one that is stuck holds up nobody's ending, and
#: what it does not hear it knows by the session's stamp.
DROP_S = 2.0
#: Seconds that it may take to say how it is: whoever asks has a second for the whole answer.
HEALTH_S = 0.7
#: Seconds that the parent may take to say how all of them are.
PARENT_HEALTH_S = 0.9
#: Its number, the method, path and body that made it, and until when it holds.
Change = tuple[int, str, str, bytes, float]


class RelayedAnswer(NamedTuple):
    """What one worker answered; `absent`: it is not there, and this says so."""

    status: int
    kind: str
    body: bytes
    absent: bool = False


class WorkerControl:
    """The parent's side: hands requests to every worker, and remembers what they changed."""

    def __init__(self, secret: str) -> None:
        self._workers: dict[int, str] = {}
        self._ended: set[int] = set()  # those that are being started again
        self._client = AsyncHttpClient(total_s=WORKER_TIMEOUT_S, headers={SECRET_HEADER: secret})
        self._changes: dict[tuple[str, ...], Change] = {}
        self._changed = 0  # how often anything was

    def routes(self) -> list[BaseRoute]:
        """The routes that every worker must hear of."""
        return [Route(path, self.shared, methods=["GET", "POST", "DELETE"]) for path in SHARED_ROUTES]

    async def shared(self, request: Request) -> Response:
        """Hands a request to every worker; one answer out of theirs, or the first that is no 200. Where one could not
        be paused, none is."""
        path, headers, body = await _handed_on(request)
        if request.url.path == "/health":
            return await self._health(path, headers)
        changes = request.method != "GET"
        within_s = DROP_S if request.url.path == DROP_SESSION else WORKER_TIMEOUT_S
        answers: list[RelayedAnswer] = []
        asked: list[str] = []
        # One that was started while the others took their time, as a drain does, is asked too.
        while new := [worker for worker in self._workers.values() if worker not in asked]:
            asked += new
            asking = (self._ask(worker, request.method, path, body, headers, within_s) for worker in new)
            answers += await asyncio.gather(*asking)
            if not changes:
                break
        if not answers:
            return refusal_response(
                Refusal("the workers of this gateway are starting", 503, code="starting", retry_after=1)
            )
        if changes:
            # A worker that is gone hears of it when it is back: what the others do is what holds. One that is there and
            # did not hear it would go on as before: whoever asked has to ask again.
            there = set(self._workers.values())
            each = zip(asked, answers, strict=True)
            answers = [answer for worker, answer in each if not answer.absent or worker in there] or answers
        wrong = next((answer for answer in answers if answer.status != 200), None)
        if wrong is None and changes:
            self._remember(request.method, path, body, _lasts_s(request.url.path, answers[0].body))
        if wrong is not None:
            if request.url.path == "/pause" and any(answer.status == 200 for answer in answers):
                await self._resume(path.replace("/pause", "/resume", 1), headers)
            return Response(wrong.body, wrong.status, media_type=wrong.kind)
        return Response(join_answers(request.url.path, answers), 200, media_type=answers[0].kind)

    async def _resume(self, path: str, headers: Mapping[str, str]) -> None:
        """Resumes every worker, also one that hears only of the pause before."""
        self._remember("POST", path, b"", math.inf)
        await asyncio.gather(*(self._ask(worker, "POST", path, b"", headers) for worker in self._workers.values()))

    async def _health(self, path: str, headers: Mapping[str, str]) -> Response:
        """The first trouble that a worker has; one that does not answer soon is one. Always an answer, and at once."""
        workers = list(self._workers.items())  # some may come and end meanwhile
        answers = await asyncio.gather(*(self._ask(at, "GET", path, b"", headers, HEALTH_S) for _, at in workers))
        found = [
            orjson.loads(answer.body)
            if answer.status == 200
            else {"status": "degraded", "detail": f"worker {number} does not answer /health within {HEALTH_S:g} s"}
            for (number, _), answer in zip(workers, answers, strict=True)
        ]
        found += [
            {"status": "degraded", "detail": f"worker {number} ended, and is being started again"}
            for number in self._ended
        ]
        starting = {"status": "degraded", "detail": "the workers of this gateway are starting"}
        said = next((each for each in found if each["status"] != "ok"), found[0] if found else starting)
        return Response(orjson.dumps(said), media_type="application/json")

    async def add_worker(self, number: int, worker: str) -> bool:
        """Takes in a worker that listens, perhaps in place of one that died, once it is told what changed before; False
        where that cannot be told to it."""
        told = 0
        while todo := [change for change in self._changes.values() if change[0] > told]:  # more may come meanwhile
            told = self._changed
            for _, method, path, body, until in todo:
                if time.monotonic() < until:
                    answer = await self._ask(worker, method, path, body, {TRUSTED_HEADER: "yes"})
                    if answer.absent:
                        return False
        self._workers[number] = worker
        self._ended.discard(number)
        return True

    def remove_worker(self, number: int) -> None:
        """A worker has ended, and is started again."""
        self._workers.pop(number, None)
        self._ended.add(number)

    async def close(self) -> None:
        await self._client.close()

    async def _ask(
        self,
        worker: str,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        within_s: float = WORKER_TIMEOUT_S,
    ) -> RelayedAnswer:
        try:
            answer = await self._client.request(method, worker + path, body, headers=headers, total_s=within_s)
            return RelayedAnswer(answer.status, answer.content_type, answer.body)
        except NoAnswer as error:
            why = f"a worker of this gateway is starting: {error.reason}"
            said = Refusal(why, 503, code="worker_starting", retry_after=1)
            return RelayedAnswer(503, "application/json", bytes(refusal_response(said).body), absent=True)

    def _remember(self, method: str, path: str, body: bytes, lasts_s: float) -> None:
        route = path.partition("?")[0]
        if route == DROP_SESSION:
            return
        self._changed += 1
        change = (self._changed, method, path, body, time.monotonic() + lasts_s)
        if route in ("/pause", "/resume"):  # a resume is remembered too: a worker may be hearing of the pause just now
            model = parse_qs(path.partition("?")[2], keep_blank_values=True).get("model", [])[:1]
            pause = ("pause", *model)  # an empty name is the default's; without any it is of all
            self._replace(pause, change, over=pause)
            return
        fields = orjson.loads(body)
        which = str(fields.get("server") or fields.get("address") or "")
        key = (route, str(fields.get("model") or ""), which)
        self._replace(key, change, over=key if which or route != "/policy_version" else key[:2])

    def _replace(self, key: tuple[str, ...], change: Change, *, over: tuple[str, ...]) -> None:
        """Remembers a change as the last, in place of those whose key begins so: it says what they said, anew."""
        self._changes = {known: earlier for known, earlier in self._changes.items() if known[: len(over)] != over}
        self._changes[key] = change


def _lasts_s(route: str, answer: bytes) -> float:
    """For how long a change holds that a worker answered so: a pause ends by itself."""
    return float(orjson.loads(answer)["lease_s"]) if route == "/pause" else math.inf


class ControlRelay:
    """The worker's side: sends what concerns all workers to the parent, unless it comes from there."""

    def __init__(self, app: ASGIApp, *, socket: str, secret: str) -> None:
        self._app = app
        self._secret = secret.encode()
        self._client = AsyncHttpClient("http://control", total_s=WORKER_TIMEOUT_S, socket_path=socket)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in SHARED_ROUTES:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if hmac.compare_digest(headers.get(SECRET_HEADER.encode(), b""), self._secret):
            trusted = TRUSTED_HEADER.encode() in headers or scope["path"] == DROP_SESSION
            await self._app({**scope, "headrace.trusted": trusted}, receive, send)
            return
        await (await self._relayed(Request(scope, receive)))(scope, receive, send)

    async def _relayed(self, request: Request) -> Response:
        if request.url.path == DROP_SESSION:
            return refusal_response(Refusal("there is no such route", 404))
        try:
            path, headers, body = await _handed_on(request)
        except BodyTooLarge:
            return refusal_response(
                Refusal(f"the body is larger than {MAX_BODY_BYTES} bytes", 413, code="body_too_large")
            )
        return await self.ask(request.method, path, body, headers)

    async def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Response:
        """The parent's answer; 503 where it gives none, but for `/health`, which is a 200 while this worker serves."""
        health = path == "/health"
        within_s = PARENT_HEALTH_S if health else WORKER_TIMEOUT_S
        try:
            answer = await self._client.request(method, path, body, headers=headers, total_s=within_s)
            return Response(answer.body, answer.status, media_type=answer.content_type)
        except NoAnswer as error:
            if health:
                said = f"the gateway's parent process does not answer: {error.reason}"
                return Response(orjson.dumps({"status": "degraded", "detail": said}), media_type="application/json")
            return refusal_response(
                Refusal(f"the gateway's parent process does not answer: {error.reason}", 503, retry_after=1)
            )

    async def dropped(self, uid: str) -> None:
        """Lets the other workers forget what they know of a trajectory."""
        await self.ask("POST", DROP_SESSION, orjson.dumps({"trajectory_uid": uid}), {})


async def _handed_on(request: Request) -> tuple[str, dict[str, str], bytes]:
    """What of a request is handed on: its path with its query, its key, its body."""
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    headers = {name: value for name, value in request.headers.items() if name in ("authorization", "x-api-key")}
    return path, headers, await read_body(request, MAX_BODY_BYTES)


def join_answers(path: str, answers: list[RelayedAnswer]) -> bytes:
    """One answer out of every worker's."""
    if path == "/metrics":
        return joined_by_worker(answer.body.decode() for answer in answers)
    found = [orjson.loads(answer.body) for answer in answers]
    if path == "/stats":
        return orjson.dumps(
            {**found[0], "gateway": sum_counts([each["gateway"] for each in found]), "workers": len(found)}
        )
    return answers[0].body


def sum_counts(values: list[Any]) -> Any:
    """Counts added up, by name; what is no count is the first worker's."""
    if all(type(value) is int for value in values):
        return sum(values)
    if all(isinstance(value, dict) for value in values):
        names = list(dict.fromkeys(name for value in values for name in value))
        return {name: sum_counts([value[name] for value in values if name in value]) for name in names}
    return next((value for value in values if value is not None), None)


def control_app(control: WorkerControl) -> Starlette:
    """What the parent serves to its workers, beside its pool: the control of all of them."""
    return Starlette(routes=control.routes())
