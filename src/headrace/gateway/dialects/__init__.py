"""The dialects that agents speak: each reads a body into a `CallRequest`, and writes turns as its own answers.

A dialect knows no tokens, no pool and no server. Another one is another module with a `Dialect` in it, and its routes.
"""

from __future__ import annotations

from typing import Any, Protocol

from headrace.gateway.errors import Refusal
from headrace.gateway.request import CallRequest
from headrace.gateway.turn import Choice, Turn
from headrace.gateway.upstream.types import SampledChoice
from headrace.tokens import AnswerDelta


class AnswerEvents(Protocol):
    """Writes one answer as server-sent events. Made for one stream, so it may keep state."""

    def opening(self) -> bytes:
        """The events before the first token."""
        ...

    def delta(self, turn: Turn, choice: Choice, delta: AnswerDelta, piece: SampledChoice | None) -> bytes:
        """The event for what is new, empty where nothing is. `piece` is None for text that was held back to the end."""
        ...

    def closing(self) -> bytes:
        """The events that say how it ended."""
        ...

    def error(self, refusal: Refusal) -> bytes:
        """An error in a stream that has begun, perhaps before its opening."""
        ...


class Dialect(Protocol):
    """One kind of request and its answer, whole or as events. `vendor` is whose it is."""

    vendor: str

    def read(self, body: bytes) -> CallRequest:
        """Parses a request's body; raises `InvalidInput`, naming the field, where it cannot be honoured."""
        ...

    def headers(self, call_id: str) -> dict[str, str]:
        """The header in which the dialect's SDKs look for a call's id."""
        ...

    def whole(self, turns: list[Turn]) -> Any:
        """The answer as JSON."""
        ...

    def events(self, turns: list[Turn]) -> AnswerEvents:
        """The writer of a streamed answer."""
        ...

    def error(self, refusal: Refusal) -> Any:
        """An error as JSON."""
        ...


class CountingDialect(Dialect, Protocol):
    """A dialect in which agents may ask how long a prompt would be."""

    def read_count(self, body: bytes) -> CallRequest:
        """Parses the body of a request to count; raises like `read`."""
        ...

    def counted(self, tokens: int) -> Any:
        """The answer as JSON."""
        ...
