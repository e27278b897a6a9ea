"""`tool_choice` as what rollout servers honour: a structural tag that only well-formed calls pass.

vLLM's completions know no tools; told nothing, the model would answer as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from headrace.gateway.ask import Bad
from headrace.tokens import Grammar

#: How each family writes one call: what stands before the name, between name and arguments, behind them.
CALLS = {
    "hermes": ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "mistral": ('[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]"),
    "llama": ('{"name": "', '", "parameters": ', "}"),
}


def must_call(grammar: Grammar, tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """`structured_outputs` under which an answer is exactly one call of one of the named tools."""
    if grammar.calls not in CALLS:
        raise Bad(
            "tool_choice: this model's tool calls have no grammar that could be enforced; use auto", "tool_choice"
        )
    before, between, behind = CALLS[grammar.calls]
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
