"""Recorded conversations for tests of whoever scores them: turns as a gateway would have recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace import DataPool, Step
from headrace.pool.remote import RemotePool
from headrace.tokens import Message, Renderer

STOP = "<|im_end|>"


def steps_of(renderer: Renderer, turns: Sequence[tuple[str, str]], **fields: Any) -> list[Step]:
    """The steps of a conversation: each turn is what the user said, and what was sampled."""
    found: list[Step] = []
    prompt: list[int] = []
    response: list[int] = []
    for index, (said, answered) in enumerate(turns):
        if index == 0:
            prompt = renderer.render([Message("user", said)])
        else:
            bridge = renderer.bridge(prompt, response, (), [Message("user", said)])
            assert bridge is not None
            prompt = prompt + response + bridge
        response = renderer.vocabulary.encode(answered + STOP)
        found.append(
            Step(
                prompt_ids=prompt,
                response_ids=response,
                step_index=index,
                rollout_log_probs=[-1.0] * len(response),
                is_last=index == len(turns) - 1,
                **fields,
            )
        )
    return found


def record(
    pool: DataPool | RemotePool,
    renderer: Renderer,
    uid: str,
    turns: Sequence[tuple[str, str]],
    *,
    prompt_uid: str | None = None,
    channel: str = "train",
    row: dict[str, Any] | None = None,
    n_rollouts: int | None = None,
) -> None:
    """A complete trajectory without a reward, with the fields of its row."""
    pool.open(uid, prompt_uid, channel, row, n_rollouts)
    pool.submit_steps(steps_of(renderer, turns, trajectory_uid=uid, prompt_uid=prompt_uid or uid), channel)
