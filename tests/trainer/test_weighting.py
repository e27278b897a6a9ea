"""How much each token counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.kit import sequence

from headrace import Sequence
from headrace.data.errors import InvalidInput
from headrace.trainer.weighting import token_weights


@st.composite
def several(draw: st.DrawFn) -> list[Sequence]:
    made = []
    for _ in range(draw(st.integers(1, 5))):
        spans, at = [], 1
        for _ in range(draw(st.integers(1, 4))):
            size = draw(st.integers(1, 6))
            spans.append((at, at + size))
            at += size + draw(st.integers(1, 3))
        made.append(sequence(spans))
    return made


@given(several(), st.sampled_from(["token", "sequence", "step"]))
def test_the_weights_of_a_minibatch_sum_to_one_and_lie_on_targets(sequences: list[Sequence], how: str) -> None:
    weights = token_weights(sequences, how)
    assert sum(float(w.sum()) for w in weights) == pytest.approx(1, abs=1e-5)
    for found, one in zip(weights, sequences, strict=True):
        assert np.array_equal(found > 0, one.loss_mask)


def test_by_token_a_long_answer_counts_for_more() -> None:
    one, other = token_weights([sequence([(1, 2)]), sequence([(1, 4)])], "token")
    assert one[1] == other[1] == pytest.approx(1 / 4)


def test_by_sequence_a_long_answer_counts_as_a_short_one() -> None:
    one, other = token_weights([sequence([(1, 2)]), sequence([(1, 4)])], "sequence")
    assert one[1] == pytest.approx(1 / 2)
    assert other[1] == pytest.approx(1 / 6)


def test_by_step_every_call_counts_alike() -> None:
    (found,) = token_weights([sequence([(1, 2), (4, 8)])], "step")
    assert found[1] == pytest.approx(1 / 2)
    assert found[4:8].tolist() == pytest.approx([1 / 8] * 4)


def test_by_constant_nothing_depends_on_what_was_sampled() -> None:
    one, other = token_weights([sequence([(1, 2)]), sequence([(1, 9)])], "constant", 10)
    assert one[1] == other[1] == pytest.approx(1 / 20)


def test_an_unknown_way_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"tokens.*token, sequence"):
        token_weights([sequence()], "tokens")
