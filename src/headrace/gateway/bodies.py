"""What the routes that speak no dialect take, by field."""

from __future__ import annotations

from typing import Any

import msgspec


class InitTrajectory(msgspec.Struct, forbid_unknown_fields=True):
    prompt_uid: str | None = None
    channel: str | None = None
    metadata: dict[str, Any] | None = None
    n_rollouts: int | None = None
    trajectory_uid: str | None = None
    sampling: dict[str, Any] | None = None


class RegisterTrajectory(msgspec.Struct, forbid_unknown_fields=True):
    channel: str | None = None
    metadata: dict[str, Any] | None = None
    n_rollouts: int | None = None


class Reward(msgspec.Struct, forbid_unknown_fields=True):
    reward: float
    step_index: int | None = None


class Feedback(msgspec.Struct, forbid_unknown_fields=True):
    response_id: str
    reward: float
    comment: str | None = None


class CompleteTrajectory(msgspec.Struct, forbid_unknown_fields=True):
    reward: float | None = None
    channel: str | None = None


class Generate(msgspec.Struct, forbid_unknown_fields=True):
    """Ids, or messages; the parameters either in `sampling_params` or beside the messages."""

    prompt_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    trajectory_uid: str | None = None
    prompt_uid: str | None = None
    model: str | None = None


class WireStep(msgspec.Struct, forbid_unknown_fields=True):
    """A step as white-box flows send it."""

    prompt_ids: list[int]
    response_ids: list[int]
    trajectory_uid: str
    prompt_uid: str | None = None
    step_index: int | None = None
    reward: float | None = None
    rollout_log_probs: list[float] | None = None
    policy_version: int | None = None
    is_last: bool | None = None
    metadata: dict[str, Any] | None = None
    multi_modal_data: dict[str, Any] | None = None
    routed_experts: Any = None
    finish_reason: str | None = None
    sampling: dict[str, Any] | None = None
    created_at: float | None = None
    call_id: str | None = None
    version_spans: list[tuple[int, int]] | None = None


class SubmitSteps(msgspec.Struct, forbid_unknown_fields=True):
    steps: list[WireStep]


class ComputeReward(msgspec.Struct, forbid_unknown_fields=True):
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    dataset_fields: dict[str, Any] | None = None
    extra_fields: dict[str, Any] | None = None
    num_turns: int | None = None
    trajectory_uid: str | None = None
    messages: list[Any] | None = None


class PolicyVersion(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    server: str | None = None
    model: str | None = None


class Drop(msgspec.Struct, forbid_unknown_fields=True):
    trajectory_uid: str


class Server(msgspec.Struct, forbid_unknown_fields=True):
    address: str
    model: str | None = None
