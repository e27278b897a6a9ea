"""`TrainingBackend`: how a batch becomes what one kind of trainer computes with. Here packed tensors (the tokens of all
sequences in one row, with nothing between them and no padding) and padded ones (one sequence a row, filled up at its
end to the longest); verl's are in `verl`.

All of them keep to the same rules. The unit is a Sequence. A sequence that does not fit is left out and counted, never
cut: a cut one would be learned from without its end, or without what it answered to. So is one with images, whose
tokens are not all that it answered to. The first token of a sequence is never a target, for nothing precedes it. What
is not left out stands in the batch's order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from headrace.data.errors import InvalidInput, shown
from headrace.data.guidance import NO_TOKEN
from headrace.data.sequence import Sequence
from headrace.data.step import FloatArray, check_count
from headrace.pool.batch import Batch
from headrace.trainer.prefix_tree import PrefixTree, SharingRule, TokenRow, shared_row

T = TypeVar("T")
Floats = npt.NDArray[np.floating[Any]]


class TrainingBackend(ABC, Generic[T]):
    """Converts batches to a `T`."""

    @abstractmethod
    def convert(self, batch: Batch | Iterable[Sequence]) -> T:
        """All sequences of a batch that fit; what was left out is counted in the result."""


def sequences_in(batch: Batch | Iterable[Sequence]) -> list[Sequence]:
    """A batch's sequences; those given, where they are sequences already."""
    return batch.sequences() if isinstance(batch, Batch) else list(batch)


def fitting(
    batch: Batch | Iterable[Sequence], weights: list[Floats] | None, max_length: int | None
) -> tuple[list[Sequence], list[Floats] | None, int]:
    """The sequences that are short enough and hold no images, their weights, and how many are left out. Raises
    `InvalidInput` where `weights` has not one entry for each token."""
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
    """The loss mask without the first token, which nothing predicts."""
    mask = sequence.loss_mask.copy()
    mask[:1] = False
    return mask


def advantages_of(sequence: Sequence) -> FloatArray:
    """A sequence's advantages; zeros where it has none."""
    return np.zeros(len(sequence), np.float32) if sequence.advantages is None else sequence.advantages


def temperatures_of(sequence: Sequence) -> FloatArray:
    """For each token what its logits are divided by to compare with its recorded log-prob; 1 for context."""
    found = np.ones(len(sequence), np.float32)
    for span in sequence.spans:
        found[span.start : span.end] = span.temperature
    return found


def moved(converted: T, device: torch.device | str) -> T:
    """A copy of a dataclass with its tensors on a device."""
    given: Any = converted
    tensors = {f.name: v for f in fields(given) if isinstance(v := getattr(given, f.name), torch.Tensor)}
    found: T = replace(given, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """S sequences of T tokens in all, M of which are targets. The arrays from `log_probs` on are over the targets.

    ids, positions  int64[T]    the tokens, and where in its sequence each stands
    cuts            S + 1       where sequences begin and end: sequence i is ids[cuts[i]:cuts[i + 1]]
    states          int64[M]    which of the T tokens' hidden states predicts each target: the token before it
    target_ids      int64[M]    the targets' tokens
    log_probs       float32[M]  the rollout's, NaN where they were not recorded
    advantages      float32[M]  0 where a Sequence has none
    weights         float32[M]  each target's share of the loss; 1/M where none are given
    temperatures    float32[M]  what the logits are divided by to compare with `log_probs`
    versions        int64[M]    the policy that sampled each
    sequence        int64[M]    which of the S sequences each belongs to
    skipped                     sequences that were too long or hold images
    teacher_ids     int64[M, K] candidates for each that a teacher was asked about, -1 behind the last; None without one
    teacher_log_probs  float32[M, K]  what it thinks of them, -inf behind the last
    tree                        where sequences share tokens: how the row's segments hang together, and `cuts` are
                                the segments'; T counts a shared token once
    """

    ids: torch.Tensor
    positions: torch.Tensor
    cuts: list[int]
    states: torch.Tensor
    target_ids: torch.Tensor
    log_probs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    temperatures: torch.Tensor
    versions: torch.Tensor
    sequence: torch.Tensor
    skipped: int = 0
    teacher_ids: torch.Tensor | None = None
    teacher_log_probs: torch.Tensor | None = None
    tree: PrefixTree | None = None

    def to(self, device: torch.device | str) -> Packed:
        return moved(self, device)


class PackedBackend(TrainingBackend[Packed]):
    """Packs sequences into one row; those of more than `max_length` tokens are skipped and counted. With a rule for
    sharing, tokens that several sequences begin with stand once where that pays, and those from a sequence's last
    target on, whose states predict nothing, are left out."""

    def __init__(self, max_length: int | None = None, *, sharing: SharingRule | None = None) -> None:
        self.max_length, self.sharing = max_length, sharing

    def convert(self, batch: Batch | Iterable[Sequence], weights: list[Floats] | None = None) -> Packed:
        """`weights` has one array for each sequence of the batch, in its order, with one entry for each token."""
        sequences, given, skipped = fitting(batch, weights, self.max_length)
        lengths = np.array([len(sequence) for sequence in sequences], np.int64)
        masks = [targets_of(sequence) for sequence in sequences]
        mask = _row(masks, np.bool_)
        count = int(mask.sum())
        even = np.full(count, 1 / max(count, 1), np.float32)
        row = _side_by_side(sequences) if self.sharing is None else _sharing(sequences, self.sharing)
        before = (places[np.flatnonzero(mask) - 1] for places, mask in zip(row.places, masks, strict=True))

        def taken(arrays: Iterable[npt.NDArray[Any]], dtype: type[np.generic]) -> torch.Tensor:
            return torch.from_numpy(_row(arrays, dtype)[mask])

        return Packed(
            ids=torch.from_numpy(row.ids),
            positions=torch.from_numpy(row.positions),
            cuts=list(row.tree.cuts),
            states=torch.from_numpy(_row(before, np.int64)),
            target_ids=taken((sequence.tokens for sequence in sequences), np.int64),
            log_probs=taken((sequence.log_probs for sequence in sequences), np.float32),
            advantages=taken(map(advantages_of, sequences), np.float32),
            weights=torch.from_numpy(even) if given is None else taken(given, np.float32),
            temperatures=taken(map(temperatures_of, sequences), np.float32),
            versions=taken((sequence.versions for sequence in sequences), np.int64),
            sequence=torch.from_numpy(np.repeat(np.arange(len(sequences)), lengths)[mask]),
            skipped=skipped,
            tree=row.tree if row.tree.is_shared else None,
            **_teacher(sequences, mask),
        )


def predicting_tokens(sequence: Sequence) -> npt.NDArray[np.int32]:
    """The tokens whose hidden states the targets depend on: all before the last target. Empty where there is none."""
    targets = np.flatnonzero(targets_of(sequence))
    return sequence.tokens[: targets[-1] if len(targets) else 0]


def _side_by_side(sequences: list[Sequence]) -> TokenRow:
    """All tokens of all sequences one after the other."""
    lengths = np.array([len(sequence) for sequence in sequences], np.int64)
    cuts = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(cuts[-1])
    return TokenRow(
        ids=_row((sequence.tokens for sequence in sequences), np.int64),
        positions=places - np.repeat(cuts[:-1], lengths),
        tree=PrefixTree.of(cuts.tolist()),
        places=[places[begin:end] for begin, end in pairwise(cuts)],
    )


def _sharing(sequences: list[Sequence], rule: SharingRule) -> TokenRow:
    """The predicting tokens of all sequences, shared ones once."""
    given = [predicting_tokens(sequence) for sequence in sequences]
    row = shared_row([tokens for tokens in given if len(tokens)], rule)
    found = iter(row.places)
    return replace(row, places=[next(found) if len(tokens) else np.empty(0, np.int64) for tokens in given])


def _teacher(sequences: list[Sequence], mask: npt.NDArray[np.bool_]) -> dict[str, torch.Tensor]:
    """What teachers think of candidates for the targets, in rows of one width; nothing where no sequence has any."""
    given = [one.guidance for one in sequences]
    width = max(
        (one.teacher_ids.shape[1] for one in given if one is not None and one.teacher_ids is not None), default=0
    )
    if not width:
        return {}
    ids = np.full((len(mask), width), NO_TOKEN, np.int64)
    log_probs = np.full((len(mask), width), -np.inf, np.float32)
    at = 0
    for sequence, guidance in zip(sequences, given, strict=True):
        if guidance is not None and guidance.teacher_ids is not None and guidance.teacher_log_probs is not None:
            rows, columns = guidance.teacher_ids.shape
            ids[at : at + rows, :columns] = guidance.teacher_ids
            log_probs[at : at + rows, :columns] = guidance.teacher_log_probs
        at += len(sequence)
    return {"teacher_ids": torch.from_numpy(ids[mask]), "teacher_log_probs": torch.from_numpy(log_probs[mask])}


def _row(arrays: Iterable[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")


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
    """Pads sequences to the longest, rounded up to a multiple of `multiple_of`; those over `max_length` are skipped."""

    def __init__(self, pad_id: int, max_length: int | None = None, multiple_of: int = 1) -> None:
        self.pad_id = check_count(pad_id, "pad_id")
        self.max_length = max_length
        self.multiple_of = check_count(multiple_of, "multiple_of", 1)

    def convert(self, batch: Batch | Iterable[Sequence], weights: list[Floats] | None = None) -> Padded:
        """`weights` has one array for each sequence of the batch, in its order, with one entry for each token."""
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
