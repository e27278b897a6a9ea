"""A scored group as steps, and sequences as a scored group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.scored.groups import body

from headrace.data import InvalidInput, Step
from headrace.data.packing import pack
from headrace.data.scored import decode, from_sequences, read_group, to_steps
from headrace.data.sequence import Sequence

LOG_PROBS = st.floats(-100, 0, width=32)


def steps_of(tokens: list[int], masks: list[int], **more: Any) -> list[Step]:
    group = {"tokens": [tokens], "masks": [masks], "scores": [0.5], **more}
    return to_steps(read_group(body(group)).piece, "p")


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    n = draw(st.integers(2, 12))
    mask = np.array([False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))])
    tokens = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n)), np.int32)
    drawn = np.array(draw(st.lists(LOG_PROBS, min_size=n, max_size=n)), np.float32)
    probs = np.where(mask, drawn, np.float32(0))
    reward = draw(st.none() | st.floats(-1e6, 1e6))
    return Sequence(tokens, mask, probs, np.zeros(n, np.int32), "t", "p", reward, ())


@given(found=st.lists(sequences(), min_size=1, max_size=4))
def test_sequences_are_steps_again(found: list[Sequence]) -> None:
    scored = from_sequences(found, env_id=3)
    assert (scored.sequences, scored.env_id) == (len(found), 3)
    steps = to_steps(scored.piece, "p")
    pack(steps)
    for n, sequence in enumerate(found):
        own = [step for step in steps if step.trajectory_uid == f"p-{n}"]
        assert [step.step_index for step in own] == list(range(len(own)))
        assert [step.is_last for step in own] == [False] * (len(own) - 1) + [True]
        assert [step.reward for step in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].reward == (sequence.reward or 0.0)
        trained = np.zeros(len(sequence), np.bool_)
        for step in own:
            start, end = len(step.prompt_ids), len(step.prompt_ids) + len(step.response_ids)
            assert [*step.prompt_ids, *step.response_ids] == sequence.tokens[:end].tolist()
            if step.trainable:
                trained[start:end] = True
                np.testing.assert_array_equal(step.rollout_log_probs, sequence.log_probs[start:end])
        np.testing.assert_array_equal(trained, sequence.loss_mask)


@given(found=sequences())
def test_the_conventions_of_the_fields(found: Sequence) -> None:
    group = decode(from_sequences([found]).piece)
    (masks,), (probs,) = group["masks"], group["inference_logprobs"]
    for token, trained, mask, prob in zip(found.tokens.tolist(), found.loss_mask, masks, probs, strict=True):
        assert mask == (token if trained else -100)
        assert trained or prob == 1.0


def test_a_log_prob_that_nobody_recorded_leaves_the_field_out() -> None:
    tokens, mask = np.array([1, 2], np.int32), np.array([False, True])
    one = Sequence(tokens, mask, np.array([0, np.nan], np.float32), tokens, "t", "p", 1.0, ())
    assert decode(from_sequences([one]).piece)["inference_logprobs"] is None


def test_every_trained_run_is_a_step_after_all_that_stands_before_it() -> None:
    found = steps_of([1, 2, 3, 4, 5, 6], [-100, 2, 3, -100, -100, 6], inference_logprobs=[[1, -1, -2, 1, 1, -3]])
    assert [(step.prompt_ids.tolist(), step.response_ids.tolist()) for step in found] == [
        ([1], [2, 3]),
        ([1, 2, 3, 4, 5], [6]),
    ]
    assert [step.rollout_log_probs.tolist() for step in found] == [[-1.0, -2.0], [-3.0]]


def test_the_first_token_is_context_always() -> None:
    (step,) = steps_of([1, 2, 3], [1, 2, 3])
    assert (step.prompt_ids.tolist(), step.response_ids.tolist()) == ([1], [2, 3])


def test_what_trains_nothing_still_has_its_score() -> None:
    (step,) = steps_of([1, 2, 3], [-100, -100, -100], inference_logprobs=[[1, 1, 1]])
    assert (step.trainable, step.reward, step.rollout_log_probs) == (False, 0.5, None)


def test_log_probs_of_another_length_are_none() -> None:
    (step,) = steps_of([1, 2, 3], [-100, 2, 3], inference_logprobs=[[-1.0]])
    assert step.rollout_log_probs is None


def test_what_else_was_sent_is_the_last_steps_metadata() -> None:
    chat = [[{"role": "user", "content": "?"}]]
    sent = {"advantages": [[0.5, 1.0]], "messages": chat, "overrides": [{"a": 1}], "env_id": 4, "images": [10**30]}
    (step,) = steps_of([1, 2], [-100, 2], **sent, generation_params={"temperature": 0.5})
    own = {"advantages": [0.5, 1.0], "messages": chat[0], "overrides": {"a": 1}, "env_id": 4, "images": [1e30]}
    assert step.metadata == {**own, "generation_params": {"temperature": 0.5}, "scored_group": True}
    pack([step])


@pytest.mark.parametrize(("tokens", "words"), [([1], "has 1 entries"), ([1, 2**31], "token ids lie in")])
def test_what_can_be_no_step_is_refused(tokens: list[int], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        steps_of(tokens, [-100] * len(tokens))
