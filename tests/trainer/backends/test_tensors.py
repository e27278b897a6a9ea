"""Packed and padded tensors: the same batch, token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.kit import pool_of, sequence

from headrace import Sequence
from headrace.data.errors import InvalidInput
from headrace.trainer.backends import PackedBackend, PaddedBackend

FIELDS = ("log_probs", "advantages", "weights", "temperatures", "versions")


@st.composite
def sequences(draw: st.DrawFn) -> list[Sequence]:
    """Of any length and with any mask, the first token's included."""
    found = []
    for at in range(draw(st.integers(0, 6))):
        length = draw(st.integers(1, 12))
        start = draw(st.integers(0, length - 1))
        end = draw(st.integers(start + 1, length))
        temperature = draw(st.sampled_from([1.0, 0.5]))
        made = sequence([(start, end)], length, advantage=at + 0.5, seed=at, uid=f"t{at}", temperature=temperature)
        if draw(st.booleans()):
            made = replace(made, log_probs=np.where(made.loss_mask, np.nan, 0).astype(np.float32))
        found.append(made if draw(st.booleans()) else replace(made, advantages=None))
    return found


def some_weights(batch: list[Sequence]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    return [np.arange(1, len(each) + 1, dtype=np.float32) * (at + 1) for at, each in enumerate(batch)]


def by_definition(batch: list[Sequence]) -> list[tuple[int, int, tuple[float, ...]]]:
    """Every target as (sequence, position, its values), one token at a time."""
    found = []
    for at, each in enumerate(batch):
        for t in range(1, len(each)):
            if each.loss_mask[t]:
                advantage = 0.0 if each.advantages is None else float(each.advantages[t])
                temperature = next(s.temperature for s in each.spans if s.start <= t < s.end)
                weight = (t + 1) * (at + 1)
                values = (float(each.log_probs[t]), advantage, float(weight), temperature, float(each.versions[t]))
                found.append((at, t, values))
    return found


def same(found: list[tuple[int, int, tuple[float, ...]]], wanted: list[tuple[int, int, tuple[float, ...]]]) -> bool:
    """NaN, a log-prob that was not recorded, is itself here."""
    return repr(found) == repr(wanted)


@given(sequences())
def test_packed_targets_are_the_sampled_tokens_but_a_first_one(batch: list[Sequence]) -> None:
    packed = PackedBackend().convert(batch, some_weights(batch))
    values = torch.stack([getattr(packed, name).double() for name in FIELDS], -1).tolist()
    targets = zip(packed.sequence.tolist(), (packed.states + 1).tolist(), values, strict=True)
    found = [(at, t - packed.cuts[at], tuple(each)) for at, t, each in targets]
    assert same(found, by_definition(batch))


@given(sequences())
def test_packed_tokens_stand_one_after_the_other(batch: list[Sequence]) -> None:
    packed = PackedBackend().convert(batch)
    assert packed.ids.tolist() == [int(token) for each in batch for token in each.tokens]
    assert packed.positions.tolist() == [t for each in batch for t in range(len(each))]
    assert packed.cuts == [0, *np.cumsum([len(each) for each in batch]).tolist()]


@given(sequences(), st.integers(1, 8))
def test_padded_rows_hold_the_same(batch: list[Sequence], multiple_of: int) -> None:
    padded = PaddedBackend(pad_id=99, multiple_of=multiple_of).convert(batch, some_weights(batch))
    at, t = (where.tolist() for where in padded.loss_mask.nonzero(as_tuple=True))
    values = torch.stack([getattr(padded, name)[at, t].double() for name in FIELDS], -1).tolist()
    assert same([(i, j, tuple(each)) for i, j, each in zip(at, t, values, strict=True)], by_definition(batch))
    width = padded.ids.shape[1]
    assert width % multiple_of == 0
    assert width - max(map(len, batch), default=0) < multiple_of
    for row, each in enumerate(batch):
        rest = width - len(each)
        assert padded.ids[row].tolist() == [*each.tokens.tolist(), *[99] * rest]
        assert padded.attention_mask[row].tolist() == [1] * len(each) + [0] * rest
        assert padded.positions[row].tolist() == [*range(len(each)), *[0] * rest]
        assert padded.versions[row, len(each) :].tolist() == [-1] * rest
        assert not padded.weights[row][~padded.loss_mask[row]].any()


@given(sequences())
def test_without_weights_every_target_counts_alike_and_all_of_them_one(batch: list[Sequence]) -> None:
    packed, padded = PackedBackend().convert(batch), PaddedBackend(0).convert(batch)
    count = len(packed.states)
    assert packed.weights.tolist() == [pytest.approx(1 / max(count, 1))] * count
    assert padded.weights[padded.loss_mask].tolist() == packed.weights.tolist()
    assert padded.weights.sum().item() == pytest.approx(1 if count else 0)


@given(sequences(), st.integers(1, 12))
def test_a_sequence_that_is_too_long_is_skipped_and_counted_and_never_cut(batch: list[Sequence], longest: int) -> None:
    short = [each for each in batch if len(each) <= longest]
    weights = some_weights(batch)
    kept = [weight for weight, each in zip(weights, batch, strict=True) if len(each) <= longest]
    for backend, whole in [
        (PackedBackend(max_length=longest), PackedBackend()),
        (PaddedBackend(0, max_length=longest), PaddedBackend(0)),
    ]:
        found, wanted = backend.convert(batch, weights), whole.convert(short, kept)  # type: ignore[attr-defined]
        assert found.skipped == len(batch) - len(short)
        assert found.ids.tolist() == wanted.ids.tolist()
        assert found.weights.tolist() == wanted.weights.tolist()


def test_a_batch_of_a_pool_is_its_sequences() -> None:
    batch = pool_of([[0.0, 1.0], [1.0, 0.0]], turns=2).fetch_batch(2, timeout=0)
    assert batch is not None
    whole, listed = PackedBackend().convert(batch), PackedBackend().convert(batch.sequences())
    assert len(whole.cuts) == 5
    assert torch.equal(whole.ids, listed.ids)
    assert len(whole.states) == 4 * 2 * 4


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"\[3\].*\[4\]"):
        PackedBackend().convert([sequence()], [np.ones(3, np.float32)])


def test_tensors_move_to_a_device_together() -> None:
    for made in (PackedBackend().convert([sequence()]), PaddedBackend(0).convert([sequence()])):
        moved = made.to("meta")
        assert moved.ids.is_meta
        assert moved.weights.is_meta
        assert not made.ids.is_meta
        assert moved.skipped == 0
