"""Which version sampled which token: spans `((first token, version), ...)` from token 0, no version like the last."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headrace.data.step import INT32_MAX
from headrace.gateway.upstream.types import Spans


class Told(msgspec.Struct):
    """One of a server's `weight_versions`: its tokens `[start, end)` are of this version."""

    version: str
    start: int
    end: int


def extended(spans: Spans, first: int, version: int) -> Spans:
    """The spans with tokens from `first` on under this version."""
    if spans and spans[-1][1] == version:
        return spans
    return (*spans, (first, version))


def joined(before: Spans, tokens: int, after: Spans) -> Spans:
    """The spans of an answer that was cut after so many tokens and continued."""
    for first, version in after:
        before = extended(before, tokens + first, version)
    return before


def told_spans(told: Sequence[Told] | None, known: int) -> Spans:
    """What a server told; nothing where none of it is a number, or its spans leave a gap.

    A version without a number beside one that has it is the one that was known when the call began.
    """
    if not told or all(version_number(span.version) is None for span in told):
        return ()
    spans: Spans = ()
    at = 0
    for span in told:
        if span.start != at or span.end < span.start:
            return ()
        if span.end > span.start:
            number = version_number(span.version)
            spans = extended(spans, span.start, known if number is None else number)
        at = span.end
    return spans


def version_number(told: str) -> int | None:
    """A version as servers tell it. "default" is one that nobody told any, "step-7" somebody else's name for one."""
    if not (told.isascii() and told.isdigit() and len(told) <= 10):
        return None
    return number if (number := int(told)) <= INT32_MAX else None
