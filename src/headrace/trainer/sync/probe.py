"""A known run of tokens, and what the trainer's own forward pass says of it: a server with the same weights agrees.

In float32 two implementations differ by some 1e-6, and 1e-3 leaves room for other hardware: in `tiny`, one matrix that
is 1 % off is found, one that is 0.01 % off (a gap of 2e-5) is not. In bfloat16 a logit of 16 to 32 is rounded by up to
1/16, and what the layers before rounded comes on top. Rounding all that SmolLM2-135M computes to bfloat16 moved the
log-probs of 512 tokens by up to 0.28 and by 0.035 in the mean (float16: 0.026 and 0.005); two sides that both round may
be further apart, hence some three times that. So a probe finds weights that are wrong, not ones that are a small step
old.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.data.errors import InvalidInput
from headrace.trainer.sync.errors import ServerFailed


@dataclass(frozen=True)
class Gap:
    """How far a server's log-probs are from the trainer's."""

    largest: float
    mean: float

    def within(self, allowed: Gap) -> bool:
        return self.largest <= allowed.largest and self.mean <= allowed.mean


#: What a precision alone explains, the finest first.
TOLERANCE = {"float32": Gap(1e-3, 1e-3), "float16": Gap(0.1, 0.015), "bfloat16": Gap(0.8, 0.1)}


@dataclass(frozen=True)
class Probe:
    """`log_probs[i]` is that of `ids[i + 1]` at temperature 1, under the very weights that are published.

    `dtype` is what the trainer computed them in, where that is not what the weights are in: `bfloat16` under autocast.
    """

    ids: Sequence[int]
    log_probs: Sequence[float]
    dtype: str | None = None

    def __post_init__(self) -> None:
        if len(self.ids) < 2 or len(self.log_probs) != len(self.ids) - 1:
            raise InvalidInput(
                f"a probe has {len(self.ids)} ids and {len(self.log_probs)} log_probs; it needs at least 2 ids, and "
                "one log-prob for each but the first"
            )
        if not all(math.isfinite(value) for value in self.log_probs):
            raise InvalidInput("a probe's log_probs are not all finite: the trainer's own weights are broken")

    def gap(self, found: Sequence[float]) -> Gap:
        """Raises `ServerFailed` where there is not one log-prob a token."""
        if len(found) != len(self.log_probs):
            raise ServerFailed(f"it scored {len(found)} tokens of the {len(self.log_probs)} of the probe")
        gaps = [abs(one - other) for one, other in zip(found, self.log_probs, strict=True)]
        if not all(math.isfinite(gap) for gap in gaps):
            return Gap(math.inf, math.inf)
        return Gap(max(gaps), sum(gaps) / len(gaps))


def tolerance(*dtypes: str | None) -> Gap:
    """That of the coarsest of these; float32's where none is known."""
    known = [allowed for dtype, allowed in TOLERANCE.items() if dtype in dtypes]
    return known[-1] if known else TOLERANCE["float32"]
