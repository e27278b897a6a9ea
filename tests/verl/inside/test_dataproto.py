"""`VerlBackend` against verl itself: its DataProto, its advantages, its losses, its metrics.

verl's wheel brings a package `tests` of its own, which hides ours: `kit` is `tests.trainer.kit`, by its folder.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from kit import pool_of, sequence
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.reward import extract_reward
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.utils.model import compute_position_id_with_mask

from headrace import Sequence
from headrace.data.errors import InvalidInput
from headrace.trainer.backends import VerlBackend
from verl import DataProto

PAD = 99
BACKEND = VerlBackend(prompt_length=6, response_length=12, pad_id=PAD)

#: Two answers with two tokens of context between them; the second earned the reward.
TURNS = sequence([(3, 5), (7, 10)], reward=1.0, rewards=[None, 1.0], uid="t0", seed=3)


def group(rewards: list[float], prompt: str) -> list[Sequence]:
    return [
        replace(sequence([(2, 5 + at)], reward=reward, rewards=[reward], uid=f"{prompt}-{at}"), prompt_uid=prompt)
        for at, reward in enumerate(rewards)
    ]


def test_a_multi_turn_sequence_stands_as_verls_rollout_would_put_it() -> None:
    data = BACKEND.convert([TURNS])
    assert isinstance(data, DataProto)
    row = {name: tensor[0].tolist() for name, tensor in data.batch.items()}
    tokens = TURNS.tokens.tolist()
    assert row["prompts"] == [PAD] * 3 + tokens[:3]
    assert row["responses"] == tokens[3:] + [PAD] * 5
    assert row["input_ids"] == row["prompts"] + row["responses"]
    assert row["attention_mask"] == [0] * 3 + [1] * 10 + [0] * 5
    assert row["response_mask"] == [1, 1, 0, 0, 1, 1, 1] + [0] * 5
    assert row["rm_scores"] == row["token_level_scores"] == [0] * 6 + [1.0] + [0] * 5
    assert row["rollout_log_probs"] == pytest.approx([*TURNS.log_probs[3:].tolist(), *[0] * 5])
    assert (data.non_tensor_batch["uid"][0], data.non_tensor_batch["trajectory_uid"][0]) == ("p", "t0")
    assert data.non_tensor_batch["__num_turns__"][0] == 2


def test_positions_are_those_that_verl_computes_from_the_mask() -> None:
    data = BACKEND.convert([TURNS, *group([0.0, 1.0], "a")])
    assert torch.equal(data.batch["position_ids"], compute_position_id_with_mask(data.batch["attention_mask"]))


def test_verls_grpo_advantages_are_those_worked_out_by_hand() -> None:
    first, second = [1.0, 0.0, 0.0], [2.0, 4.0]
    data = delivered(VerlBackend(6, 12, PAD, world_size=4), [*group(first, "a"), *group(second, "b")])
    found, _ = compute_grpo_outcome_advantage(
        data.batch["token_level_scores"], data.batch["response_mask"], data.non_tensor_batch["uid"]
    )
    third = 1 / math.sqrt(3)  # the spread of 1, 0, 0
    expected = [(2 / 3) / third, (-1 / 3) / third, (-1 / 3) / third, -1 / math.sqrt(2), 1 / math.sqrt(2), 0, 0, 0]
    mask = data.batch["response_mask"]
    for row, advantage in enumerate(expected):
        assert found[row][mask[row] == 1].tolist() == pytest.approx([advantage] * int(mask[row].sum()), abs=1e-5)
        assert not found[row][mask[row] == 0].any()


def delivered(backend: VerlBackend, sequences: list[Sequence]) -> DataProto:
    """What arrives at a worker: a DataProto travels pickled."""
    found: DataProto = pickle.loads(pickle.dumps(backend.convert(sequences)))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_every_process_gets_as_many_rows(world_size: int) -> None:
    data = VerlBackend(6, 12, PAD, world_size=world_size).convert(group([0.0, 1.0, 0.0, 1.0, 1.0], "a"))
    chunks = data.chunk(world_size)
    assert {len(chunk) for chunk in chunks} == {-(-5 // world_size)}
    assert len(data) - 5 == data.meta_info["headrace"]["padding_rows"] == -5 % world_size
    assert len(DataProto.concat(chunks)) == len(data)


def test_rows_that_were_added_change_no_loss() -> None:
    batch = group([0.0, 1.0, 0.0], "a")
    losses = []
    for world_size in (1, 8):
        data = VerlBackend(6, 12, PAD, world_size=world_size).convert(batch)
        mask = data.batch["response_mask"]
        values = torch.ones_like(mask, dtype=torch.float32)
        values[:3] = torch.arange(3.0)[:, None]
        losses.append([agg_loss(values, mask, how).item() for how in ("token-mean", "seq-mean-token-mean")])
    assert losses[0] == pytest.approx(losses[1])


def test_a_sequence_that_is_too_long_is_skipped_and_counted() -> None:
    long_prompt, long_response = sequence([(7, 9)], uid="prompt"), sequence([(2, 15)], uid="response")
    data = BACKEND.convert([long_prompt, TURNS, long_response])
    assert data.non_tensor_batch["trajectory_uid"].tolist() == ["t0"]
    assert data.meta_info["headrace"] == {"skipped": 2, "padding_rows": 0, "left_out": {}}


def test_a_prompt_and_a_response_that_just_fit_are_whole() -> None:
    data = BACKEND.convert([sequence([(6, 18)])])
    assert data.batch["attention_mask"].all()
    assert data.batch["response_mask"].all()


def test_verls_importance_weights_compare_with_the_recorded_log_probs() -> None:
    data = BACKEND.convert([TURNS, sequence([(2, 6)], seed=1, reward=0.0)])
    mask = data.batch["response_mask"]
    data.batch["old_log_probs"] = data.batch["rollout_log_probs"] + 0.5 * mask
    found, _ = compute_rollout_correction_and_add_to_batch(
        data, RolloutCorrectionConfig.decoupled_token_is(threshold=5.0)
    )
    weights = found.batch["rollout_is_weights"][mask == 1]
    assert weights.tolist() == pytest.approx([math.exp(0.5)] * int(mask.sum()), rel=1e-4)


def test_verls_rewards_and_metrics_read_it() -> None:
    data = BACKEND.convert([*group([1.0, 0.0], "a"), *group([3.0, 0.0], "b")])
    rewards, extra = extract_reward(data)
    assert rewards.sum(-1).tolist() == [1.0, 0.0, 3.0, 0.0]
    assert extra == {}
    zeros = torch.zeros_like(rewards)
    for name in ("token_level_rewards", "advantages", "returns"):
        data.batch[name] = zeros
    metrics = compute_data_metrics(data, use_critic=False)
    assert metrics["critic/score/mean"] == pytest.approx(1.0)
    assert metrics["response_length/max"] == 4
    assert metrics["num_turns/mean"] == 1


def test_a_batch_of_a_pool_becomes_its_groups() -> None:
    batch = pool_of([[0.0, 1.0], [1.0, 0.0]], turns=2, version=3).fetch_batch(2, timeout=0)
    data = VerlBackend(8, 16, PAD).convert(batch)
    assert data.non_tensor_batch["uid"].tolist() == ["g0", "g0", "g1", "g1"]
    assert data.batch["response_mask"].sum(-1).tolist() == [8] * 4
    assert data.batch["rm_scores"].sum(-1).tolist() == [0.0, 1.0, 1.0, 0.0]
    assert data.non_tensor_batch["max_global_steps"].tolist() == [3] * 4


def test_what_is_not_known_of_every_row_is_left_to_verl() -> None:
    unrecorded = replace(TURNS, log_probs=np.full(len(TURNS), np.nan, np.float32))
    assert "rollout_log_probs" not in BACKEND.convert([TURNS, unrecorded]).batch
    assert "rm_scores" not in BACKEND.convert([TURNS, replace(TURNS, reward=None)]).batch


def test_one_temperature_is_told_and_two_are_refused() -> None:
    warm, cold = sequence(temperature=1.0), sequence(temperature=0.5)
    assert BACKEND.convert([cold, cold]).meta_info["temperature"] == 0.5
    with pytest.raises(InvalidInput, match=r"\[0.5, 1.0\]"):
        BACKEND.convert([warm, cold])


def test_a_batch_with_nothing_that_fits_is_empty() -> None:
    data = VerlBackend(1, 1, PAD, world_size=2).convert([TURNS])
    assert len(data) == 0
    assert data.meta_info["headrace"] == {"skipped": 1, "padding_rows": 0, "left_out": {}}
