"""Conversations that an agent may go on with by naming an answer: what was said, beside the ids that the pool holds.

A step keeps only what is new in it and which call it goes on from, so that a trajectory's text is kept once. What is
named here is found again by any gateway on the same pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from headrace.gateway.call.ask import Ask
from headrace.tokens import Image, Message, Node
from headrace.tokens.vision import images_of

#: Where a step's metadata holds it.
STORED_FIELD = "kept"


class StoredResponse(msgspec.Struct, frozen=True):
    """One call's share: its new messages and its answer, behind those of the call `before`.

    Messages that open a conversation for one call alone are not among them; `opening` says how many there were.
    """

    before: str | None
    opening: int
    messages: tuple[Message, ...]

    def to_metadata(self) -> str:
        """As text: arguments of calls may nest deeper than metadata may. Images' files are the step's own already."""
        return msgspec.json.encode(self._with_files({})).decode()

    @classmethod
    def from_metadata(cls, given: Any, files: Mapping[str, bytes]) -> StoredResponse | None:
        """None where a flow wrote something of its own there, or an image is lost. `files` are the step's images'."""
        try:
            found = msgspec.json.decode(given, type=cls) if isinstance(given, str) else None
        except (msgspec.MsgspecError, RecursionError):
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
    """What is kept of one trajectory, by call."""

    def __init__(self) -> None:
        self._by_call: dict[str, StoredResponse] = {}

    def __contains__(self, call: str) -> bool:
        return call in self._by_call

    def add(self, call: str, kept: StoredResponse | None) -> None:
        if kept is not None:
            self._by_call[call] = kept

    def share(self, ask: Ask, answer: Message, parent: Node | None) -> StoredResponse:
        """What a call is to keep: of a conversation that goes on from one that is kept, only what is new."""
        assert ask.conversation is not None
        messages = ask.conversation.messages
        known = self._by_call.get(parent.call) if parent is not None else None
        if parent is None or known is None or known.opening != ask.opening:
            return StoredResponse(None, ask.opening, (*messages[ask.opening :], answer))
        return StoredResponse(parent.call, ask.opening, (*messages[parent.record.messages :], answer))

    def answers(self, calls: Iterable[str]) -> dict[str, Message]:
        """The answers to those of the calls that are kept."""
        return {call: self._by_call[call].messages[-1] for call in calls if call in self._by_call}

    def messages(self, call: str) -> tuple[Message, ...] | None:
        """The whole conversation up to a call's answer; None where it is not kept."""
        shares: list[tuple[Message, ...]] = []
        at: str | None = call
        while at is not None:
            kept = self._by_call.get(at)
            if kept is None:
                return None
            shares.append(kept.messages)
            at = kept.before
        return tuple(message for share in reversed(shares) for message in share)
