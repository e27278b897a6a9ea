"""What environments say about tokens, where verl computes with it: its advantages, its KL, its distillation.

The groups arrive as an environment posts them. Their sequences are of four tokens, of which the last two are targets.
"""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, kl_penalty
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

import verl
from headrace import DataPool
from headrace.data.scored import read_group, to_steps
from headrace.trainer.backends import VerlBackend, keep_given_advantages
from verl import DataProto

#: By its file: the package around it imports `datasets`, which nothing else here needs.
DISTILLATION = Path(verl.__file__).parent / "trainer" / "distillation" / "fsdp" / "losses.py"
PAD = 9
VOCABULARY = 10
#: GRPO's advantages of the scores below, worked out by hand.
GRPO = [-1 / math.sqrt(2), 1 / math.sqrt(2)]


def converted(world_size: int = 1, **said: Any) -> DataProto:
    """A group of two, posted with what is said about its tokens."""
    body = {
        "tokens": [[1, 2, 3, 4], [1, 2, 5, 6]],
        "masks": [[-100, -100, 3, 4], [-100, -100, 5, 6]],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25], [1.0, 1.0, -0.75, -1.0]],
        "scores": [0.0, 1.0],
    }
    with DataPool(channels={"train": {"n_rollouts": 2}}) as pool:
        pool.submit_steps(to_steps(read_group(msgspec.json.encode({**body, **said})).piece, "p"))
        return VerlBackend(3, 4, PAD, world_size).convert(pool.fetch_batch(1, timeout=0))


def with_verls_advantages(data: DataProto) -> DataProto:
    """As verl's trainer does before it learns: whatever stood there is replaced."""
    found, returns = compute_grpo_outcome_advantage(
        data.batch["token_level_scores"], data.batch["response_mask"], data.non_tensor_batch["uid"]
    )
    data.batch["advantages"], data.batch["returns"] = found, returns
    return data


def test_advantages_of_all_rows_are_verls() -> None:
    data = converted(3, advantages=[[0.0, 7.0, 0.25, -0.5], [0.0, 0.0, 1.5, 2.0]])
    expected = [[0.25, -0.5, 0, 0], [1.5, 2.0, 0, 0], [0, 0, 0, 0]]
    assert data.batch["advantages"].tolist() == data.batch["returns"].tolist() == expected
    again = keep_given_advantages(with_verls_advantages(data))
    assert again.batch["advantages"].tolist() == expected


def test_a_zeroed_row_is_zero_after_verl_has_computed_the_others() -> None:
    data = converted(overrides=[{"set_advantage_to_zero": True}, {}])
    assert "advantages" not in data.batch
    found = keep_given_advantages(with_verls_advantages(data)).batch
    assert found["advantages"][0].tolist() == [0.0] * 4
    assert found["advantages"][1].tolist() == pytest.approx([GRPO[1]] * 2 + [0, 0], abs=1e-4)
    assert found["returns"][0].tolist() == pytest.approx([GRPO[0]] * 2 + [0, 0], abs=1e-4)


def test_a_batch_of_which_nothing_was_said_is_left_to_verl() -> None:
    data = converted()
    assert {"advantages", "returns", "given_advantages", "ref_log_prob", "teacher_ids"}.isdisjoint(data.batch.keys())
    assert data.meta_info["headrace"]["left_out"] == {}
    found = keep_given_advantages(with_verls_advantages(data)).batch["advantages"]
    assert found[:, 0].tolist() == pytest.approx(GRPO, abs=1e-4)


def test_verls_kl_is_taken_to_the_reference_that_came() -> None:
    data = converted(ref_logprobs=[[1.0, 1.0, -0.75, -0.25], [1.0, 1.0, -0.75, -3.0]]).batch
    found = kl_penalty(data["rollout_log_probs"], data["ref_log_prob"], "kl") * data["response_mask"]
    assert found.tolist() == [[0.25, 0, 0, 0], [0, 2.0, 0, 0]]


def test_what_only_some_rows_bring_is_left_out_and_counted() -> None:
    rows = [[[], [], [3, 1], [4]], []]
    data = converted(
        ref_logprobs=[[1.0, 1.0, -0.75, -0.25], []],
        distill_token_ids=rows,
        distill_logprobs=[[[-0.5] * len(row) for row in each] for each in rows],
    )
    assert {"ref_log_prob", "teacher_ids", "teacher_logprobs"}.isdisjoint(data.batch.keys())
    assert data.meta_info["headrace"]["left_out"] == {"ref_log_prob": 1, "teacher_logprobs": 1}


def test_verls_distillation_finds_each_tokens_candidates() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    ids = [[[], [], [3, 7], [4]], [[], [], [5, 8], [6, 2]]]
    log_probs = [[[], [], [half, quarter], [half]], [[], [], [quarter, half], [quarter, quarter]]]
    data = converted(3, distill_token_ids=ids, distill_logprobs=log_probs)
    flat = left_right_2_no_padding(data.to_tensordict())
    logits = torch.zeros(1, flat["input_ids"].values().numel(), VOCABULARY)  # a student that has no opinion
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None))
    forward_kl = runpy.run_path(str(DISTILLATION))["compute_forward_kl_topk"]
    out = forward_kl(logits, flat["teacher_logprobs"], flat["teacher_ids"], config, "thd")
    even = math.log(VOCABULARY)
    losses = no_padding_2_padding(out["distillation_losses"][0], flat) * data.batch["response_mask"]
    both, one, quarters = 0.5 * (half + even) + 0.25 * (quarter + even), 0.5 * (half + even), 0.5 * (quarter + even)
    assert losses.flatten().tolist() == pytest.approx([both, one, 0, 0, both, quarters, *[0] * 6], abs=1e-5)
    teacher = no_padding_2_padding(flat["teacher_ids"], flat)
    assert teacher[:2, :2].tolist() == [[[3, 7], [4, PAD]], [[5, 8], [6, 2]]]


def test_a_sequence_that_was_told_of_more_tokens_than_it_has_is_skipped_and_counted() -> None:
    data = converted(advantages=[[0.0, 0.0, 1.0], [0.0, 0.0, 1.5, 2.0]])
    assert data.batch["responses"][:, :2].tolist() == [[5, 6]]
    assert data.meta_info["headrace"]["skipped"] == 1
