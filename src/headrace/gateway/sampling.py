"""The effective parameters of a call: what the agent asked for, what its channel says of it, what the model can hold.

Every one that shapes the distribution is explicit, so that no server's default changes it behind our back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.gateway.ask import EXPLICIT, Ask
from headrace.gateway.errors import Refusal
from headrace.gateway.settings import Settings, channel_values


class Sampling:
    """How one gateway decides parameters."""

    def __init__(self, settings: Settings) -> None:
        self._prompt_length = settings.prompt_length
        self._response_length = settings.response_length
        self._forced = _by_channel(settings.sampling)
        self._refused = _by_channel(settings.refuse)

    def effective(
        self,
        ask: Ask,
        channel: str,
        prompt: int,
        context: int | None,
        stop_ids: Iterable[int] = (),
        forced: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The parameters for a prompt of so many tokens; `Refusal` where it is too long, or a value is not allowed.
        `forced`: those that its trajectory says, which stand before the agent's and behind its channel's."""
        most = self._room(prompt, context)
        given = {**EXPLICIT, **ask.sampling, **(forced or {})}
        for name, value in self._refused.get(channel, {}).items():
            if given.get(name) == value:
                raise Refusal(
                    f"channel {channel!r} does not take {name}={value}", 400, code="parameter_refused", param=name
                )
        given |= self._forced.get(channel, {})
        asked = given.get("max_tokens")
        given["max_tokens"] = min(asked, most) if asked is not None else most
        if ask.n > 1:
            given["n"] = ask.n
        ends = [*given.get("stop_token_ids", ()), *stop_ids] if not given.get("ignore_eos") else []
        if ends:
            given["stop_token_ids"] = sorted(set(ends))
        return given

    def check_length(self, prompt: int, context: int | None, *, at_least: bool = False) -> None:
        """Refuses a prompt of so many tokens, or of `at_least` so many, that is too long."""
        longest = self._prompt_length
        if context is not None:
            longest = min(longest, context - 1) if longest is not None else context - 1
        if longest is not None and prompt > longest:
            raise Refusal(
                f"the prompt has {'at least ' if at_least else ''}{prompt} tokens; at most {longest} are taken. "
                "Shorten the conversation: nothing is ever cut here",
                400,
                code="context_length_exceeded",
                param="messages",
            )

    def _room(self, prompt: int, context: int | None) -> int:
        """How many tokens an answer may have."""
        self.check_length(prompt, context)
        room = context - prompt if context is not None else None
        caps = [cap for cap in (self._response_length, room) if cap is not None]
        return min(caps) if caps else DEFAULT_ROOM


#: The most an answer may have where neither a flag nor the server says.
DEFAULT_ROOM = 4096


def _by_channel(specs: Iterable[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for spec in specs:
        channel, values = channel_values(spec)
        found.setdefault(channel, {}).update(values)
    return found
