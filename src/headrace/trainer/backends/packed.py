"""Packed tensors: the tokens of all sequences in one row, with nothing between them. No token of it is padding.

Position `t` of the row is about the t-th token; a token at `targets[m]` is predicted from the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.data.sequence import Sequence
from headrace.pool.batch import Batch
from headrace.trainer.backends.base import (
    Floats,
    TrainingBackend,
    advantages_of,
    fitting,
    moved,
    targets_of,
    temperatures_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """S sequences of T tokens in all, M of which are targets. The arrays from `log_probs` on are over the targets.

    ids, positions  int64[T]    the tokens, and where in its sequence each stands
    cuts            S + 1       where sequences begin and end: sequence i is ids[cuts[i]:cuts[i + 1]]
    targets         int64[M]    which of the T tokens are trained on, ascending
    log_probs       float32[M]  the rollout's, NaN where they were not recorded
    advantages      float32[M]  0 where a Sequence has none
    weights         float32[M]  each target's share of the loss; 1/M where none are given
    temperatures    float32[M]  what the logits are divided by to compare with `log_probs`
    versions        int64[M]    the policy that sampled each
    sequence        int64[M]    which of the S sequences each belongs to
    skipped                     sequences that were too long or hold images
    """

    ids: torch.Tensor
    positions: torch.Tensor
    cuts: list[int]
    targets: torch.Tensor
    log_probs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    temperatures: torch.Tensor
    versions: torch.Tensor
    sequence: torch.Tensor
    skipped: int = 0

    def to(self, device: torch.device | str) -> Packed:
        return moved(self, device)


class PackedBackend(TrainingBackend[Packed]):
    """Sequences of more than `max_length` tokens are skipped and counted."""

    def __init__(self, max_length: int | None = None) -> None:
        self.max_length = max_length

    def convert(self, batch: Batch | Iterable[Sequence], weights: list[Floats] | None = None) -> Packed:
        """`weights` has one array a sequence of the batch, in its order, with one entry a token."""
        sequences, given, skipped = fitting(batch, weights, self.max_length)
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        cuts = np.concatenate([[0], np.cumsum(lengths)])
        mask = _row(map(targets_of, sequences), np.bool_)
        targets = np.flatnonzero(mask)
        even = np.full(len(targets), 1 / max(len(targets), 1), np.float32)

        def taken(arrays: Iterable[npt.NDArray[Any]], dtype: type[np.generic]) -> torch.Tensor:
            return torch.from_numpy(_row(arrays, dtype)[mask])

        return Packed(
            ids=torch.from_numpy(_row((sequence.tokens for sequence in sequences), np.int64)),
            positions=torch.from_numpy(np.arange(cuts[-1]) - np.repeat(cuts[:-1], lengths)),
            cuts=cuts.tolist(),
            targets=torch.from_numpy(targets),
            log_probs=taken((sequence.log_probs for sequence in sequences), np.float32),
            advantages=taken(map(advantages_of, sequences), np.float32),
            weights=torch.from_numpy(even) if given is None else taken(given, np.float32),
            temperatures=taken(map(temperatures_of, sequences), np.float32),
            versions=taken((sequence.versions for sequence in sequences), np.int64),
            sequence=torch.from_numpy(np.repeat(np.arange(len(sequences)), lengths)[mask]),
            skipped=skipped,
        )


def _row(arrays: Iterable[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")
