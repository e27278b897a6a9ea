"""What is asked of a rollout server and what it answers, the same whichever server and whichever wire.

Ids and log-probs are exactly the server's: nothing here counts, cuts or repairs them. Which policy version sampled
which token is told in spans `((first token, version), ...)` from token 0 on, no version like the one before it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.data.step import IntArray
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
