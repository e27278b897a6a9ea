"""Forms that a template does not show: facts about families, as data.

A declaration is considered where the vocabulary has its tokens, and taken where the template's own calls are read back
by it, or where the template writes none.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from headrace.tokens.forms import (
    CallForm,
    Channels,
    Grammar,
    JsonObject,
    KeyValues,
    NamedArguments,
    Parameters,
    Reasoning,
)

#: Marks around reasoning, for templates that leave reasoning out of the past or take it in no field of its own.
KNOWN_REASONING = (
    Reasoning(),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    Reasoning("<|channel>thought\n", "<channel|>"),
)


class Declared(msgspec.Struct, frozen=True):
    """A family's form. `tokens` are added tokens that its vocabulary must have, `words` what its template must hold.
    `first`: it comes before what the template shows, because the model writes more than that."""

    name: str
    grammar: Grammar
    tokens: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    first: bool = False

    def fits(self, tokens: Collection[str], template: str) -> bool:
        """Whether a vocabulary and a template may be of this family."""
        return all(token in tokens for token in self.tokens) and all(word in template for word in self.words)


_DSML = "｜DSML｜"


def _calls(form: CallForm) -> Grammar:
    return Grammar(calls=form)


def _dsml(block: str) -> Grammar:
    """DeepSeek's markup, in which a parameter says whether it is a string."""
    parameter = Parameters(
        after='">\n',
        open=f'<{_DSML}parameter name="',
        middle='" string="true">',
        close=f"</{_DSML}parameter>",
        between="\n",
        middle_json='" string="false">',
    )
    return _calls(
        CallForm(
            parameter,
            begin=f"<{_DSML}{block}>\n",
            end=f"\n</{_DSML}{block}>",
            open=f'<{_DSML}invoke name="',
            close=f"\n</{_DSML}invoke>",
            between="\n",
        )
    )


_HERMES = CallForm(JsonObject(), open="<tool_call>\n", close="\n</tool_call>", between="\n")

DECLARED: tuple[Declared, ...] = (
    Declared(
        "harmony",
        Grammar(Reasoning("<|channel|>analysis<|message|>", "<|end|>"), CallForm(Channels())),
        tokens=("<|channel|>", "<|message|>", "<|start|>", "<|call|>"),
        first=True,
    ),
    Declared(
        "gemma4",
        _calls(CallForm(KeyValues('<|"|>'), open="<|tool_call>call:", close="<tool_call|>")),
        tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    Declared("dsml of V4", _dsml("tool_calls"), tokens=(_DSML, "<｜action｜>")),
    Declared("dsml", _dsml("function_calls"), tokens=(_DSML,)),
    Declared(
        "command-r",
        _calls(
            CallForm(JsonObject("tool_name", "parameters"), begin="Action: ```json\n[\n", end="\n]```", between=",\n")
        ),
        words=("Action:", "tool_name", "```json"),
    ),
    Declared(
        "granite",
        _calls(CallForm(JsonObject(), begin="<|tool_call|>[", end="]", between=", ")),
        words=("<|tool_call|>", "JSON list"),
    ),
    Declared(
        "kimi",
        _calls(
            CallForm(
                NamedArguments(":", "<|tool_call_argument_begin|>", "functions.{name}:{id}"),
                begin="<|tool_calls_section_begin|>",
                end="<|tool_calls_section_end|>",
                open="<|tool_call_begin|>functions.",
                close="<|tool_call_end|>",
            )
        ),
        words=("<|tool_call_argument_begin|>",),
    ),
    Declared(
        "phi4-mini",
        _calls(CallForm(JsonObject(), begin="<|tool_call|>[", end="]<|/tool_call|>", between=", ")),
        tokens=("<|tool_call|>", "<|/tool_call|>"),
    ),
    Declared(
        "internlm2",
        _calls(
            CallForm(JsonObject(arguments="parameters"), open="<|action_start|><|plugin|>\n", close="<|action_end|>")
        ),
        tokens=("<|action_start|>", "<|action_end|>", "<|plugin|>"),
    ),
    Declared("hermes in the prompt", _calls(_HERMES), words=("<tool_call>", "</tool_call>")),
    Declared("hermes", _calls(_HERMES), tokens=("<tool_call>", "</tool_call>")),
)
