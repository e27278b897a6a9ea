"""`TrainingBackend`: how a batch becomes what one kind of trainer computes with.

All of them keep to the same rules. The unit is a Sequence. A sequence that does not fit is left out and counted, never
cut: a cut one would be learned from without its end, or without what it answered to. So is one with images, whose
tokens are not all that it answered to. The first token of a sequence is
never a target, for nothing precedes it. What is not left out stands in the batch's order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace.data.errors import InvalidInput, shown
from headrace.data.sequence import Sequence
from headrace.data.step import FloatArray
from headrace.pool.batch import Batch

T = TypeVar("T")
Floats = npt.NDArray[np.floating[Any]]


class TrainingBackend(ABC, Generic[T]):
    """Converts batches to a `T`."""

    @abstractmethod
    def convert(self, batch: Batch | Iterable[Sequence]) -> T:
        """All that is to be learned from a batch."""


def sequences_in(batch: Batch | Iterable[Sequence]) -> list[Sequence]:
    return batch.sequences() if isinstance(batch, Batch) else list(batch)


def fitting(
    batch: Batch | Iterable[Sequence], weights: list[Floats] | None, max_length: int | None
) -> tuple[list[Sequence], list[Floats] | None, int]:
    """The sequences that are short enough and hold no images, their weights, and how many are left out."""
    sequences = sequences_in(batch)
    given, needed = [len(each) for each in weights or ()], [len(sequence) for sequence in sequences]
    if weights is not None and given != needed:
        raise InvalidInput(
            f"weights have lengths {shown(given)}; the sequences have {shown(needed)} tokens: there must be one a token"
        )
    kept = [
        at
        for at, sequence in enumerate(sequences)
        if sequence.multi_modal_data is None and (max_length is None or len(sequence) <= max_length)
    ]
    if len(kept) == len(sequences):
        return sequences, weights, 0
    fit = [sequences[at] for at in kept]
    return fit, None if weights is None else [weights[at] for at in kept], len(sequences) - len(fit)


def targets_of(sequence: Sequence) -> npt.NDArray[np.bool_]:
    """The loss mask, less a first token that nothing predicts."""
    mask = sequence.loss_mask.copy()
    mask[:1] = False
    return mask


def advantages_of(sequence: Sequence) -> FloatArray:
    """0 where there are none."""
    return np.zeros(len(sequence), np.float32) if sequence.advantages is None else sequence.advantages


def temperatures_of(sequence: Sequence) -> FloatArray:
    """For each token what its logits are divided by to compare with its recorded log-prob; 1 outside of answers."""
    found = np.ones(len(sequence), np.float32)
    for span in sequence.spans:
        found[span.start : span.end] = span.temperature
    return found


def moved(converted: T, device: torch.device | str) -> T:
    """A dataclass of tensors, with each of them on a device."""
    given: Any = converted
    tensors = {f.name: v for f in fields(given) if isinstance(v := getattr(given, f.name), torch.Tensor)}
    found: T = replace(given, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})
    return found
