"""The server that is checked: what it is, conversations with it, and what its ids say.

JSON out, JSON or events back, one call at a time. It knows nothing of the server but its answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from headrace.checkup.answer import (
    CheckAnswer,
    CheckRequest,
    DialectClient,
    JoinedStream,
    Json,
    Malformed,
    RecordedStep,
)
from headrace.gateway.upstream.http_client import SseDecoder
from headrace.net.async_client import AsyncHttpClient
from headrace.net.http_answer import AnswerHeaders, HttpAnswer, NoAnswer


class OutOfReach(Exception):
    """Nothing can be found out: the server does not answer, or refuses the key."""


class CallRefused(Exception):
    """A call that was answered with an error."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


@dataclass(frozen=True, slots=True)
class CheckReply:
    """`events` are the data of a stream's events, `STREAM_END` among them; None for a whole answer."""

    body: Any
    events: list[bytes] | None
    headers: AnswerHeaders


class CheckHttp:
    """HTTP to one server. `key` is sent as OpenAI's and as Anthropic's clients send it."""

    def __init__(self, key: str | None, timeout_s: float) -> None:
        headers = {"anthropic-version": "2023-06-01", "user-agent": "headrace-check-gateway"}
        headers |= authorization(key) if key else {}
        self._client = AsyncHttpClient(total_s=timeout_s, headers=headers, follow_redirects=False)

    async def __aenter__(self) -> CheckHttp:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> CheckReply:
        return await self._ask("GET", url, None, headers)

    async def post(self, url: str, body: Any = None) -> CheckReply:
        return await self._ask("POST", url, body, None)

    async def _ask(self, method: str, url: str, body: Any, headers: Mapping[str, str] | None) -> CheckReply:
        try:
            answer = await self._client.request(method, url, json=body, headers=headers)
        except NoAnswer as error:
            raise OutOfReach(f"{url}: {error.reason}") from error
        except ValueError as error:  # a key that cannot stand in a header
            raise OutOfReach(f"{url}: {error}") from error
        if answer.status != 200:
            raise CallRefused(answer.status, " ".join(answer.error_text().split())[:200])
        if answer.content_type == "text/event-stream":
            return CheckReply(None, SseDecoder().feed(answer.body + b"\n\n"), answer.headers)
        return CheckReply(_json(answer), None, answer.headers)


def authorization(key: str) -> dict[str, str]:
    """A key as OpenAI's and as Anthropic's clients send it."""
    return {"authorization": f"Bearer {key}", "x-api-key": key}


def _json(answer: HttpAnswer) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None


#: The path that agents append to a server's address, and that a given URL may end with already.
API_SUFFIX = "/v1"
NO_ROUTE_STATUSES = (404, 405, 501)


class CheckTarget:
    """One server. `gateway`: it has Headrace's routes, and every conversation is a trajectory in `channel`."""

    def __init__(self, http: CheckHttp, url: str, *, model: str | None, channel: str, admin_key: str | None) -> None:
        self.http = http
        self.url = url.rstrip("/").removesuffix(API_SUFFIX)
        self.model = model or ""
        self.gateway = False
        #: Whether answers may be asked for their ids; a server that refuses unknown fields is not asked again.
        self.asks_ids = True
        #: What the gateway says that agents miss.
        self.warnings: list[str] = []
        #: Why the gateway's trajectories cannot be read; empty while they can.
        self.closed = ""
        self._channel = channel
        self._admin = authorization(admin_key) if admin_key else None
        self._begun: Any = None

    @property
    def kind(self) -> str:
        return "headrace gateway" if self.gateway else "OpenAI-compatible server"

    async def find(self) -> None:
        """Finds out what the server is, and the model that it serves; raises `OutOfReach` where it cannot."""
        base = self.url
        try:
            begun = await self._init()
            self.gateway = isinstance(begun, dict) and isinstance(begun.get("base_url"), str)
            if self.gateway:
                base, self._begun = begun["base_url"], begun
                ready = await self.told("/ready")
                self.warnings = [str(each) for each in ready.get("warnings", ())] if isinstance(ready, dict) else []
        except CallRefused as error:
            if error.status not in (400, 422, *NO_ROUTE_STATUSES):
                raise OutOfReach(f"{self.url}/init_trajectory answers {error}") from error
        if self.model:
            return
        try:
            found = (await self.http.get(f"{base}{API_SUFFIX}/models")).body
        except CallRefused as error:
            if error.status not in NO_ROUTE_STATUSES:
                raise OutOfReach(f"{base}{API_SUFFIX}/models answers {error}") from error
            raise OutOfReach(
                f"{base}{API_SUFFIX}/models answers {error}; give the API's address, and --model"
            ) from error
        cards = found.get("data") if isinstance(found, dict) else None
        named = [card["id"] for card in cards if isinstance(card, dict) and card.get("id")] if cards else []
        if not named:
            raise OutOfReach(f"{base}{API_SUFFIX}/models names no model; give --model")
        self.model = str(named[0])

    async def begin(self, dialect: DialectClient) -> CheckConversation:
        if not self.gateway:
            return CheckConversation(self, dialect, self.url, None)
        begun, self._begun = self._begun or await self._init(), None
        return CheckConversation(self, dialect, begun["base_url"], begun["trajectory_uid"])

    async def _init(self) -> Any:
        return (await self.http.post(f"{self.url}/init_trajectory", {"channel": self._channel})).body

    async def told(self, path: str, body: Any = None) -> Any:
        """The answer of a route that need not be there; None where it is not, or is refused."""
        try:
            url = self.url + path
            return (await (self.http.get(url, self._admin) if body is None else self.http.post(url, body))).body
        except CallRefused:
            return None

    async def steps(self, uid: str) -> list[RecordedStep]:
        """The recorded steps of a trajectory, in order; empty where they cannot be read, and `closed` says why."""
        try:
            found = (await self.http.get(f"{self.url}/trajectories/{quote(uid, safe='')}", self._admin)).body
        except CallRefused as error:
            self.closed = str(error)
            return []
        return [
            RecordedStep(
                step["prompt_ids"],
                step["response_ids"],
                step.get("rollout_log_probs"),
                step.get("policy_version"),
                step.get("quarantined"),
            )
            for step in found["steps"]
        ]


class CheckConversation:
    """Calls of one conversation, in one dialect; on a gateway, those of one trajectory."""

    def __init__(self, target: CheckTarget, dialect: DialectClient, base: str, uid: str | None) -> None:
        self.target, self.dialect, self.uid = target, dialect, uid
        self._base = base
        self._answers: list[CheckAnswer] = []

    async def ask(self, ask: CheckRequest) -> list[CheckAnswer]:
        """The answers to a request, streamed or not: one where one was asked for. Raises `CallRefused` or
        `Malformed`."""
        return (await self.streamed(ask))[0]

    async def streamed(self, ask: CheckRequest) -> tuple[list[CheckAnswer], JoinedStream]:
        """The answers, and how their stream was."""
        reply = await self._send(ask)
        try:
            if ask.stream and reply.events is None:
                raise Malformed("a stream was asked for, and the answer is none")
            stream = JoinedStream(reply.body) if reply.events is None else self.dialect.join(reply.events)
            answers = self.dialect.read(stream.body)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise Malformed(f"the answer is not of the dialect's shape: {type(error).__name__}: {error}") from error
        if ask.n == 1 and len(answers) != 1:  # of more, the check of n says how many came
            raise Malformed(f"one answer was asked for, and {len(answers)} came back")
        for answer in answers:
            answer.check()
            answer.version = reply.headers.get("x-headrace-policy-version", "") or None
        self._answers += answers
        return answers, stream

    async def _send(self, ask: CheckRequest) -> CheckReply:
        url, wanted = self._base + self.dialect.path, self.target.asks_ids
        try:
            return await self.target.http.post(url, self.dialect.body(replace(ask, ids=wanted), self.target.model))
        except CallRefused as error:
            if not wanted or error.status not in (400, 422):
                raise
            reply = await self.target.http.post(url, self.dialect.body(replace(ask, ids=False), self.target.model))
            self.target.asks_ids = False
            return reply

    async def end(self) -> list[CheckAnswer]:
        """Every answer of the conversation, in order, with what was recorded of it."""
        if self.uid is None:
            return self._answers
        steps = [] if self.target.closed else await self.target.steps(self.uid)
        if len(steps) == len(self._answers):
            for answer, step in zip(self._answers, steps, strict=True):
                answer.step = step
        elif not self.target.closed:
            raise Malformed(f"{len(self._answers)} answers were given and {len(steps)} steps recorded")
        with contextlib.suppress(CallRefused):  # ending it may need another key; open, it is in nobody's batch either
            await self.target.http.post(f"{self.target.url}/complete_trajectory/{quote(self.uid, safe='')}")
        return self._answers


class TokenReader:
    """Decodes ids with the tokenizer in a folder, else with the server's `/detokenize`, as vLLM has it."""

    def __init__(self, target: CheckTarget, tokenizer: Path | None) -> None:
        self._target = target
        self._vocabulary = None
        if tokenizer is not None:
            from headrace.tokens.vocabulary import load_vocabulary

            self._vocabulary = load_vocabulary(tokenizer)

    async def read(self, ids: Sequence[int]) -> str | None:
        """The text of ids; None where nobody can tell."""
        if self._vocabulary is not None:
            return self._vocabulary.decode(list(ids))
        found = await self._target.told("/detokenize", {"model": self._target.model, "tokens": list(ids)})
        text = found.get("prompt") if isinstance(found, dict) else None
        return text if isinstance(text, str) else None


QUESTION = "Tell a short story about a river."


@dataclass(frozen=True, slots=True)
class Subject:
    """What a check is made of: one server in one dialect. `completions`: it has `/v1/completions` too."""

    target: CheckTarget
    dialect: DialectClient
    reader: TokenReader
    completions: bool = False

    @property
    def question(self) -> list[Json]:
        return self.dialect.question(QUESTION)

    async def once(self, ask: CheckRequest) -> list[CheckAnswer]:
        """The answers to one question, in a conversation of its own, with what was recorded of them."""
        return (await self.streamed(ask))[0]

    async def streamed(self, ask: CheckRequest) -> tuple[list[CheckAnswer], JoinedStream]:
        """The answers to one request, in a conversation of its own, and how their stream was."""
        conversation = await self.target.begin(self.dialect)
        answers, stream = await conversation.streamed(ask)
        await conversation.end()
        return answers, stream
