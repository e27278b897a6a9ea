"""The dialects that agents speak, as a client speaks them: a question into a body, an answer out of one."""

from __future__ import annotations

from typing import Protocol

from headrace.checkup.answer import Answer, Ask, Call, Json, Stream
from headrace.checkup.dialects.chat import Chat
from headrace.checkup.dialects.completions import Completions
from headrace.checkup.dialects.messages import Messages
from headrace.checkup.dialects.responses import Responses

__all__ = ["DIALECTS", "Dialect"]


class Dialect(Protocol):
    """`turns`: conversations go on; `log_probs`, `several`: answers can have log-probs, and come several at a time."""

    name: str
    path: str
    turns: bool
    log_probs: bool
    several: bool

    def question(self, text: str) -> list[Json]:
        """What a user says, as items of a history."""

    def result(self, call: Call, text: str) -> list[Json]:
        """What a tool says."""

    def body(self, ask: Ask, model: str) -> Json: ...

    def read(self, body: Json) -> list[Answer]:
        """The choices of a whole answer; `Malformed`, or what a look into a wrong shape raises."""

    def join(self, events: list[bytes]) -> Stream:
        """A stream's events as the whole answer that they amount to."""


DIALECTS: dict[str, Dialect] = {each.name: each for each in (Chat(), Completions(), Responses(), Messages())}
