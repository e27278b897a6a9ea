"""What environments say about tokens, learned from as they said it: against formulas in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.test_learner import Watched, gradients, learner, log_probs, ppo_by_hand, reference, several

from headrace import Sequence
from headrace.data.guidance import NO_TOKEN, Guidance
from headrace.trainer import losses

#: The candidates that a teacher was asked about; one has one fewer, and one is no token of the model.
IDS, PROBS = (7, 250, 3), (0.5, 0.2, 0.1)


@given(
    st.lists(st.floats(0.01, 1), min_size=3, max_size=6),
    st.lists(st.floats(0.01, 1), min_size=6, max_size=6),
    st.integers(1, 6),
)
def test_the_distance_is_the_kl_with_all_other_tokens_as_one(
    policy: list[float], teacher: list[float], named: int
) -> None:
    size = len(policy)
    named = min(named, size)
    p = [value / sum(teacher[:size]) for value in teacher[:size]]
    q = [value / sum(policy) for value in policy]
    wanted = math.fsum(p[k] * math.log(p[k] / q[k]) for k in range(named))
    rest, left = 1 - math.fsum(p[:named]), 1 - math.fsum(q[:named])
    if named < size:
        wanted += rest * math.log(rest / left)
    padded = [*(math.log(value) for value in p[:named]), -math.inf]
    mine = [*(math.log(value) for value in q[:named]), -math.inf]
    found = losses.teacher_distance(
        torch.tensor([mine, mine], dtype=torch.float64),
        torch.tensor([padded, [-math.inf] * (named + 1)], dtype=torch.float64),
    )
    assert found.tolist() == pytest.approx([wanted, 0.0], abs=1e-4)
    assert found[0] >= -1e-9


def taught(one: Sequence) -> Sequence:
    ids = np.full((len(one), 4), NO_TOKEN, np.int32)
    probs = np.full((len(one), 4), -np.inf, np.float32)
    ids[:, :3], probs[:, :3] = IDS, np.log(PROBS)
    ids[::2, 2], probs[::2, 2] = NO_TOKEN, -np.inf
    ids[1::2, 3], probs[1::2, 3] = 10**6, math.log(0.05)
    return replace(one, guidance=Guidance(teacher_ids=ids, teacher_log_probs=probs))


def distance_by_hand(model: Any, sequences: list[Sequence]) -> torch.Tensor:
    """The mean over all targets of the distance at those of sequences with a teacher, token by token."""
    total = sum(int(one.loss_mask.sum()) for one in sequences)
    found = torch.zeros((), dtype=torch.float64)
    for one in sequences:
        if one.guidance is None:
            continue
        ids = torch.from_numpy(one.tokens.astype(np.int64))
        every = model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
        for t in np.flatnonzero(one.loss_mask):
            named = [0, 1] if t % 2 == 0 else [0, 1, 2]
            inside = [PROBS[k] * (math.log(PROBS[k]) - every[t - 1, IDS[k]]) for k in named]
            rest = 1 - sum(PROBS[k] for k in named)
            left = 1 - torch.stack([every[t - 1, IDS[k]].exp() for k in named]).sum()
            found = found + (torch.stack(inside).sum() + rest * (math.log(rest) - left.log())) / total
    return found


def test_the_gradient_of_a_teacher_is_that_of_the_formula(model: Path) -> None:
    sequences = several(3, temperature=0.7)  # a teacher's log-probs are of temperature 1, whatever was sampled at
    sequences = [taught(sequences[0]), sequences[1], taught(sequences[2])]
    mine = learner(model, algorithm={"distill": 0.5}, optimizer={"tokens": 16})
    mine.optimizer = watched = Watched(mine.policy.parameters(), lr=0)
    told = mine.learn(sequences, 0, 0)
    theirs = reference(model)
    loss = ppo_by_hand(theirs, sequences) + 0.5 * distance_by_hand(theirs, sequences)
    loss.backward()
    assert told["loss"] == pytest.approx(loss.item(), abs=1e-4)
    assert watched.seen is not None
    assert torch.allclose(watched.seen, gradients(theirs), atol=1e-4)
    assert told["teacher_kl"] > 0


def test_a_teacher_can_be_ignored(model: Path) -> None:
    sequences = several(2)
    plain = learner(model).learn(sequences, 0, 0)
    deaf = learner(model, algorithm={"distill": 0.0}).learn([taught(one) for one in sequences], 0, 0)
    assert deaf == plain


def test_given_log_probs_stand_for_the_references(model: Path) -> None:
    """One sequence brings them, the other's are the reference model's: the KL is that of the formula."""
    first, second = several(2)
    given_row = np.linspace(-7.0, -5.0, len(first)).astype(np.float32)
    sequences = [replace(first, guidance=Guidance(ref_log_probs=given_row)), second]
    mine = learner(model, algorithm={"kl": 0.3})
    mine.optimizer = watched = Watched(mine.policy.parameters(), lr=0)
    told = mine.learn(sequences, 0, 0)
    theirs = reference(model)
    loss = ppo_by_hand(theirs, sequences)
    total = sum(int(one.loss_mask.sum()) for one in sequences)
    for one in sequences:
        now = log_probs(theirs, one)
        then = torch.from_numpy(given_row[one.loss_mask]).double() if one is sequences[0] else now.detach()
        loss = loss + 0.3 * (torch.exp(then - now) - 1 - (then - now)).sum() / total
    loss.backward()
    assert told["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert watched.seen is not None
    assert torch.allclose(watched.seen, gradients(theirs), atol=1e-5)


def test_with_a_critic_given_advantages_are_used_as_they_are(model: Path) -> None:
    first, second, third = several(3, reward=1.0)
    said = np.arange(len(first), dtype=np.float32)
    sequences = [
        replace(first, guidance=Guidance(advantages=said)),
        replace(second, guidance=Guidance(zero_advantage=True)),
        third,
    ]
    mine = learner(model, algorithm={"advantage": "gae"})
    with torch.no_grad():
        _, found = mine._fixed(sequences)
    rows = [one.advantages for one in found if one.advantages is not None]
    assert rows[0].tolist() == np.where(first.loss_mask, said, 0).tolist()
    assert not rows[1].any()
    assert rows[2].any()
