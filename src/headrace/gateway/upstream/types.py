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


class UpstreamRequest(msgspec.Struct, frozen=True, eq=False):
    """What to sample. `sampling` is in vLLM's names, effective and explicit; `extra` goes along at the top level.

    top_logprobs    alternatives that the agent asked to see of each token
    sticky          requests with the same key go to the same server under `sticky` balancing
    call_id         sent along, so that both sides' logs name a call alike
    images          each stands in the prompt where it says, as the run of ids that the server must unfold it into
    """

    prompt: IntArray
    sampling: dict[str, Any]
    extra: dict[str, Any] = {}
    top_logprobs: int = 0
    sticky: str = ""
    call_id: str = ""
    images: tuple[PlacedImage, ...] = ()

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end an answer, whoever asked for them: the agent, its trajectory or its channel."""
        return tuple(self.sampling.get("stop") or ())

    @property
    def cut(self) -> tuple[str, ...]:
        """Those of them that are not to be shown."""
        return () if self.sampling.get("include_stop_str_in_output") else self.stop

    @property
    def min_tokens(self) -> int:
        """The tokens of an answer within which nothing ends it."""
        found = self.sampling.get("min_tokens")
        return found if isinstance(found, int) else 0


class SampledChoice(msgspec.Struct, eq=False):
    """One choice of an answer, whole or, in a stream, what is new of it.

    consumed        the prompt as the server told it: the request's own array where they are equal, None where it told
                    none (or none yet: a stream tells it once)
    spans           `((first token, version), ...)` of its tokens from its beginning, complete on the last piece
    tokens, top     texts and alternatives, only where `top_logprobs` were asked for
    server          where it was sampled
    continued       whether several requests sampled it: each looked for stop strings in its own part alone
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
    continued: bool = False


class SampledAnswer(msgspec.Struct, eq=False):
    """A whole answer: its choices by index, the server that gave it, and the version known there when it began."""

    choices: list[SampledChoice]
    server: str
    version: int
