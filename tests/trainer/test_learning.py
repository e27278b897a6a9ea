"""Every loss learns: a tiny model, sampled from by a table of its own probabilities, comes to prefer the token that is
rewarded, imitated or liked by a teacher."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.kit import sequence
from tests.trainer.test_learner import learner

from headrace import Sequence
from headrace.data.guidance import Guidance
from headrace.trainer.backends.tensors import PackedBackend
from headrace.trainer.learner import Learner

#: The token that is rewarded, and the prompt after which it should come.
WANTED, PROMPT = 42, [5, 6, 7]
STEPS, SAMPLES = 12, 16


def distribution(mine: Learner) -> torch.Tensor:
    """The probability of every token after the prompt."""
    one = PackedBackend().convert([replace(sequence([(3, 4)]), tokens=np.array([*PROMPT, WANTED], np.int32))])
    every = torch.arange(mine.policy.model.config.vocab_size)[None]
    with torch.no_grad():
        return mine.policy.candidate_log_probs(one, every)[2][0].exp()


def sampled(mine: Learner, rng: np.random.Generator) -> list[Sequence]:
    """Answers of one token, with the log-probs that they were sampled with; half of them are the wanted token, so that
    there is something to learn from at once, weighted as if the policy had sampled them."""
    every = distribution(mine).numpy().astype(np.float64)
    drawn = rng.choice(len(every), SAMPLES, p=every / every.sum())
    drawn[::2] = WANTED
    found = []
    for at, token in enumerate(drawn.tolist()):
        one = sequence([(3, 4)], uid=f"t{at}", reward=float(token == WANTED))
        log_probs = np.array([0, 0, 0, np.log(every[token])], np.float32)
        found.append(replace(one, tokens=np.array([*PROMPT, token], np.int32), log_probs=log_probs))
    return found


def chance_after_learning(model: Path, label: Any, **algorithm: Any) -> tuple[float, float]:
    """The wanted token's probability before and after a few steps on what `label` makes of samples."""
    mine = learner(model, algorithm=algorithm, optimizer={"lr": 1e-2, "epochs": 2})
    rng = np.random.default_rng(1)
    before = float(distribution(mine)[WANTED])
    for step in range(STEPS):
        mine.learn([label(one) for one in sampled(mine, rng)], step, step)
    return before, float(distribution(mine)[WANTED])


def rewarded(one: Sequence) -> Sequence:
    advantage = 1.0 if one.reward else -1.0
    return replace(one, advantages=np.where(one.loss_mask, advantage, 0).astype(np.float32))


@pytest.mark.parametrize("loss", ["ppo", "tis", "gspo", "cispo"])
@pytest.mark.parametrize("old", ["rollout", "proximal"])
def test_a_loss_raises_the_chance_of_what_is_rewarded(model: Path, loss: str, old: str) -> None:
    before, after = chance_after_learning(model, rewarded, loss=loss, old=old)
    assert after > 5 * before


def test_sft_raises_the_chance_of_what_is_imitated(model: Path) -> None:
    """Whoever said it, and without a log-prob of its own."""

    def imitated(one: Sequence) -> Sequence:
        tokens = np.array([*PROMPT, WANTED], np.int32)
        return replace(one, tokens=tokens, log_probs=np.full(4, np.nan, np.float32), reward=None)

    before, after = chance_after_learning(model, imitated, loss="sft")
    assert after > 5 * before


def test_a_teacher_raises_the_chance_of_what_it_likes(model: Path) -> None:
    """Its log-probs are all that is said: there are no rewards."""

    def taught(one: Sequence) -> Sequence:
        thinks = np.where(one.tokens == WANTED, -0.1, -9.0).astype(np.float32)
        return replace(one, reward=None, advantages=None, guidance=Guidance(ref_log_probs=thinks))

    before, after = chance_after_learning(model, taught, advantage="none", teacher={})
    assert after > 5 * before


def test_a_teachers_opinion_is_added_to_an_advantage_unless_one_came_with_the_sequence(model: Path) -> None:
    mine = learner(model, algorithm={"teacher": {"weight": 0.5}})
    one = sequence([(2, 4)], advantage=2.0)
    thinks = np.array([0, 0, -1.0, -3.0], np.float32)
    given = np.array([0, 0, 7.0, 8.0], np.float32)
    says = [
        Guidance(ref_log_probs=thinks),
        Guidance(ref_log_probs=thinks, advantages=given),
        Guidance(ref_log_probs=thinks, zero_advantage=True),
    ]
    with torch.no_grad():
        _, found = mine._fixed([replace(one, guidance=said) for said in says])
    rows = [each.advantages for each in found if each.advantages is not None]
    wanted = 2.0 + 0.5 * (thinks[2:] - one.log_probs[2:])
    assert rows[0].tolist() == pytest.approx([0, 0, *wanted.tolist()])
    assert rows[1].tolist() == given.tolist()
    assert not rows[2].any()
