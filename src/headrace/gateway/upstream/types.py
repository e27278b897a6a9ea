"""What is asked of a rollout server and what it answers, the same whichever server and whichever wire.

Ids and log-probs are exactly the server's: nothing here counts, cuts or repairs them. Which policy version sampled
which token is told in spans `((first token, version), ...)` from token 0 on, no version like the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.data.step import INT32_MAX, IntArray
from headrace.tokens import PlacedImage

VersionSpans = tuple[tuple[int, int], ...]


class Order(msgspec.Struct, frozen=True, eq=False):
    """What to sample. `sampling` is in vLLM's names, effective and explicit; `extra` goes along at the top level.

    `tops` is how many alternatives a token the agent asked to see. `sticky` is what `sticky` balancing keeps together.
    `call_id` is sent upstream, so that both sides' logs name a call alike. `images` stand in the prompt where they say:
    as many ids as the server must unfold each into.
    """

    prompt: IntArray
    sampling: dict[str, Any]
    extra: dict[str, Any] = {}
    tops: int = 0
    sticky: str = ""
    call_id: str = ""
    images: tuple[PlacedImage, ...] = ()


class SampledChoice(msgspec.Struct, eq=False):
    """One choice of an answer, whole or, in a stream, what is new of it.

    `consumed` is the prompt as the server told it: the order's own array where they are equal, None where the server
    told none (or none yet: a stream tells it once). `spans` is `((first token, version), ...)` of this choice's tokens
    from its beginning, complete on the last piece. `tokens` and `top` are there only where `tops` were asked for.
    `server` is where it was sampled.
    """

    index: int
    ids: list[int]
    log_probs: list[float] | None
    text: str | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    consumed: IntArray | None = None
    spans: VersionSpans = ()
    tokens: list[str] | None = None
    top: list[dict[str, float]] | None = None
    routed_experts: Any = None
    server: str = ""


class SampledAnswer(msgspec.Struct, eq=False):
    """A whole answer: its choices by index, the server that gave it, and the version known there when it began."""

    choices: list[SampledChoice]
    server: str
    version: int


class VersionRange(msgspec.Struct):
    """One of a server's `weight_versions`: its tokens `[start, end)` are of this version."""

    version: str
    start: int
    end: int


def extend_spans(spans: VersionSpans, first: int, version: int) -> VersionSpans:
    """The spans, with the tokens from `first` on under `version`."""
    if spans and spans[-1][1] == version:
        return spans
    return (*spans, (first, version))


def join_spans(before: VersionSpans, tokens: int, after: VersionSpans) -> VersionSpans:
    """The spans of an answer that was cut after `tokens` tokens and continued."""
    for first, version in after:
        before = extend_spans(before, tokens + first, version)
    return before


def spans_of(told: Sequence[VersionRange] | None, known: int) -> VersionSpans:
    """A server's `weight_versions` as spans; empty where none of them is a number, or they leave a gap.

    A version that is no number, beside one that is, counts as `known`, the version known when the call began.
    """
    if not told or all(version_number(span.version) is None for span in told):
        return ()
    spans: VersionSpans = ()
    at = 0
    for span in told:
        if span.start != at or span.end < span.start:
            return ()
        if span.end > span.start:
            number = version_number(span.version)
            spans = extend_spans(spans, span.start, known if number is None else number)
        at = span.end
    return spans


def version_number(told: str) -> int | None:
    """A server's version as a number; None for "default" (weights nobody numbered) and names such as "step-7"."""
    if not (told.isascii() and told.isdigit() and len(told) <= 10):
        return None
    return number if (number := int(told)) <= INT32_MAX else None
