"""The effective sampling parameters of a call: what the agent asks for, its channel forces, and the model can hold.

Every one that shapes the distribution is explicit, so that no server's default changes it behind our back. vLLM's
completions know no tools, so `tool_choice` becomes a structural tag that only well-formed tool calls pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from headrace.gateway.call.ask import EXPLICIT_DEFAULTS, Ask, BadField
from headrace.gateway.errors import Refusal
from headrace.gateway.settings import GatewaySettings, channel_values
from headrace.tokens import Grammar

#: How each family writes one call: what stands before the name, between name and arguments, behind them.
TOOL_CALL_SYNTAX = {
    "hermes": ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "mistral": ('[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]"),
    "llama": ('{"name": "', '", "parameters": ', "}"),
}

#: Tokens that an answer may have where neither a flag nor the server says.
DEFAULT_MAX_TOKENS = 4096


class SamplingRules:
    """What one gateway's flags say of parameters: bounds of length, and what each channel forces or refuses."""

    def __init__(self, settings: GatewaySettings) -> None:
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
        """The parameters for a prompt of `prompt` tokens in a model's `context`; `Refusal` where it is too long, or a
        value is not allowed. `forced`: those of its trajectory, which override the agent's; its channel's override
        both."""
        most = self._max_tokens(prompt, context)
        given = {**EXPLICIT_DEFAULTS, **ask.sampling, **(forced or {})}
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

    def _max_tokens(self, prompt: int, context: int | None) -> int:
        """How many tokens an answer may have."""
        self.check_length(prompt, context)
        room = context - prompt if context is not None else None
        caps = [cap for cap in (self._response_length, room) if cap is not None]
        return min(caps) if caps else DEFAULT_MAX_TOKENS


def _by_channel(specs: Iterable[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for spec in specs:
        channel, values = channel_values(spec)
        found.setdefault(channel, {}).update(values)
    return found


def forced_tool_call(grammar: Grammar, tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """`structured_outputs` under which an answer is exactly one call of one of the named tools."""
    if grammar.calls not in TOOL_CALL_SYNTAX:
        raise BadField(
            "tool_choice: this model's tool calls have no grammar that could be enforced; use auto", "tool_choice"
        )
    before, between, behind = TOOL_CALL_SYNTAX[grammar.calls]
    tags = [
        {
            "type": "tag",
            "begin": f"{before}{tool['function']['name']}{between}",
            "content": {"type": "json_schema", "json_schema": tool["function"].get("parameters") or {"type": "object"}},
            "end": behind,
        }
        for tool in tools
        if tool["function"]["name"] in names
    ]
    calls = {"type": "tags_with_separator", "separator": "\n", "tags": tags}
    form = {"type": "structural_tag", "format": {**calls, "at_least_one": True, "stop_after_first": True}}
    return {"structural_tag": orjson.dumps(form).decode()}
