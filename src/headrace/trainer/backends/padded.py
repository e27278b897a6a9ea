"""Padded tensors: one sequence a row, filled up at its end to the longest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.data.sequence import Sequence
from headrace.data.step import check_count
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
class Padded:
    """B sequences of at most L tokens; every tensor is [B, L], and entry t is about token t, predicted from t - 1.

    ids             int64    the tokens, then `pad_id`
    attention_mask  int64    1 for tokens, 0 for padding
    positions       int64    0, 1, 2, ...; 0 in the padding, as in all that follows unless it says otherwise
    loss_mask       bool     what is trained on
    log_probs       float32  the rollout's; 0 for context, NaN where they were not recorded
    advantages      float32  0 where a Sequence has none
    weights         float32  each target's share of the loss, 0 elsewhere; where none are given, one over the targets
    temperatures    float32  what the logits are divided by to compare with `log_probs`; 1 in the padding
    versions        int64    the policy that sampled each; -1 for context and in the padding
    skipped                  sequences that were too long or hold images
    """

    ids: torch.Tensor
    attention_mask: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    log_probs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    temperatures: torch.Tensor
    versions: torch.Tensor
    skipped: int = 0

    def to(self, device: torch.device | str) -> Padded:
        return moved(self, device)


class PaddedBackend(TrainingBackend[Padded]):
    """Rows are as long as the longest sequence, rounded up to a multiple of `multiple_of`."""

    def __init__(self, pad_id: int, max_length: int | None = None, multiple_of: int = 1) -> None:
        self.pad_id = check_count(pad_id, "pad_id")
        self.max_length = max_length
        self.multiple_of = check_count(multiple_of, "multiple_of", 1)

    def convert(self, batch: Batch | Iterable[Sequence], weights: list[Floats] | None = None) -> Padded:
        """`weights` has one array a sequence of the batch, in its order, with one entry a token."""
        sequences, given, skipped = fitting(batch, weights, self.max_length)
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        width = -(-int(lengths.max(initial=0)) // self.multiple_of) * self.multiple_of
        real = np.arange(width) < lengths[:, None]

        def rows(arrays: Iterable[npt.NDArray[Any]], dtype: type[np.generic], fill: float = 0) -> npt.NDArray[Any]:
            found = np.full(real.shape, fill, dtype)
            found[real] = np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")
            return found

        mask = rows(map(targets_of, sequences), np.bool_)
        shares = mask / np.float32(max(mask.sum(), 1)) if given is None else rows(given, np.float32) * mask
        return Padded(
            ids=torch.from_numpy(rows((sequence.tokens for sequence in sequences), np.int64, self.pad_id)),
            attention_mask=torch.from_numpy(real.astype(np.int64)),
            positions=torch.from_numpy(np.arange(width) * real),
            loss_mask=torch.from_numpy(mask),
            log_probs=torch.from_numpy(rows((sequence.log_probs for sequence in sequences), np.float32)),
            advantages=torch.from_numpy(rows(map(advantages_of, sequences), np.float32)),
            weights=torch.from_numpy(shares),
            temperatures=torch.from_numpy(rows(map(temperatures_of, sequences), np.float32, 1)),
            versions=torch.from_numpy(rows((sequence.versions for sequence in sequences), np.int64, -1)),
            skipped=skipped,
        )
