"""Trajectories for a trainer, made as an agent would make them: steps submitted to a pool."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from headrace import DataPool, Sequence, Step
from headrace.data.sequence import Span


def sequence(
    spans: Seq[tuple[int, int]] = ((2, 4),),
    length: int | None = None,
    *,
    reward: float | None = 0.0,
    advantage: float | None = None,
    uid: str = "t",
    seed: int = 0,
    vocabulary: int = 50,
    finish: Seq[str | None] = (),
    rewards: Seq[float | None] = (),
    temperature: float = 1.0,
) -> Sequence:
    """A sequence whose targets are these spans of positions."""
    rng = np.random.default_rng(seed)
    length = length or spans[-1][1]
    mask = np.zeros(length, np.bool_)
    for start, end in spans:
        mask[start:end] = True
    found = [
        Span(
            step_index=at,
            start=start,
            end=end,
            reward=rewards[at] if at < len(rewards) else None,
            trained=True,
            finish_reason=finish[at] if at < len(finish) else "stop",
            sampling={"temperature": temperature},
            temperature=temperature,
        )
        for at, (start, end) in enumerate(spans)
    ]
    return Sequence(
        tokens=rng.integers(0, vocabulary, length).astype(np.int32),
        loss_mask=mask,
        log_probs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        trajectory_uid=uid,
        prompt_uid="p",
        reward=reward,
        spans=tuple(found),
        advantages=None if advantage is None else np.where(mask, advantage, 0).astype(np.float32),
    )


def submit_group(
    pool: Any,
    group: str,
    rewards: Seq[float],
    *,
    seed: int = 0,
    vocabulary: int = 50,
    tokens: int = 4,
    version: int = 0,
    turns: int = 1,
    **step: Any,
) -> None:
    """One trajectory a reward, each of `turns` calls that extend each other."""
    rng = np.random.default_rng([seed, *group.encode()])
    opening = rng.integers(0, vocabulary, 3).tolist()
    steps = []
    for at, reward in enumerate(rewards):
        prompt = list(opening)
        for turn in range(turns):
            response = rng.integers(0, vocabulary, tokens).tolist()
            last = turn == turns - 1
            made = {
                "prompt_ids": list(prompt),
                "response_ids": response,
                "rollout_log_probs": (-4 + 0.1 * rng.random(tokens)).tolist(),
                "trajectory_uid": f"{group}-{at}",
                "prompt_uid": group,
                "step_index": turn,
                "policy_version": version,
                "is_last": last,
                "reward": reward if last else None,
                "finish_reason": "stop",
            }
            steps.append(Step(**{**made, **step}))
            prompt += [*response, *rng.integers(0, vocabulary, 2).tolist()]
    pool.submit_steps(steps)


def pool_of(groups: Seq[Seq[float]], **options: Any) -> DataPool:
    pool = DataPool(channels={"train": {"n_rollouts": len(groups[0])}})
    for at, rewards in enumerate(groups):
        submit_group(pool, f"g{at}", rewards, **options)
    return pool
