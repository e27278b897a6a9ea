"""How much each token counts in a loss. Laid down for a whole minibatch before it is cut into forward passes, so that
accumulating over several passes gives the same gradient as one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from headrace.data.errors import InvalidInput, shown
from headrace.data.sequence import Sequence

Float32s = npt.NDArray[np.float32]


def token_weights(sequences: Seq[Sequence], how: str, constant_length: int = 1024) -> list[Float32s]:
    """How much each token counts: one array for each sequence, one entry for each token, 0 where it is no target.

    - `token`: every target counts alike;
    - `sequence`: every sequence counts alike, and within it every target;
    - `step`: every LLM call counts alike, and within it every target;
    - `constant`: a sum over targets, divided by the number of sequences and a fixed length (Dr. GRPO's).
    """
    masks = [sequence.loss_mask for sequence in sequences]
    if how == "token":
        total = max(sum(int(mask.sum()) for mask in masks), 1)
        return [np.float32(1 / total) * mask for mask in masks]
    if how == "sequence":
        count = max(sum(bool(mask.any()) for mask in masks), 1)
        return [np.float32(1 / (count * max(int(mask.sum()), 1))) * mask for mask in masks]
    if how == "step":
        steps = [_steps(sequence) for sequence in sequences]
        count = max(sum(len(np.unique(found[found >= 0])) for found in steps), 1)
        return [_even(found) / np.float32(count) for found in steps]
    if how == "constant":
        return [np.float32(1 / (len(masks) * constant_length)) * mask for mask in masks]
    raise InvalidInput(f"aggregation is {shown(how)}; it is one of token, sequence, step, constant")


def _steps(sequence: Sequence) -> npt.NDArray[np.int64]:
    """For each target the index of its span; -1 elsewhere."""
    found = np.full(len(sequence), -1, np.int64)
    for at, span in enumerate(sequence.spans):
        found[span.start : span.end] = at
    return np.where(sequence.loss_mask, found, -1)


def _even(steps: npt.NDArray[np.int64]) -> Float32s:
    """Weights that sum to 1 over the targets of each step."""
    weights = np.zeros(len(steps), np.float32)
    for step in np.unique(steps[steps >= 0]):
        here = steps == step
        weights[here] = 1 / here.sum()
    return weights
