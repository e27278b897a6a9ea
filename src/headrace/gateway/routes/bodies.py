"""The bodies of the routes that speak no dialect, by field. Unknown fields are refused."""

from __future__ import annotations

from typing import Any

import msgspec


class InitTrajectoryBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/init_trajectory`: all of it may be left out. `sampling` overrides what the trajectory's calls ask for."""

    prompt_uid: str | None = None
    channel: str | None = None
    metadata: dict[str, Any] | None = None
    n_rollouts: int | None = None
    trajectory_uid: str | None = None
    sampling: dict[str, Any] | None = None


class RegisterTrajectoryBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/register_trajectory`: where a trajectory belongs, and what is known of it."""

    channel: str | None = None
    metadata: dict[str, Any] | None = None
    n_rollouts: int | None = None


class RewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/reward`: for one step, or for the trajectory's last. `source` says who it is from, `info` what it was made of;
    a `person`'s is replaced by a person's only."""

    reward: float
    step_index: int | None = None
    source: str | None = None
    info: dict[str, Any] | None = None


class FeedbackBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/v1/feedback`: what an answer was worth, by its response id."""

    response_id: str
    reward: float
    comment: str | None = None


class CompleteTrajectoryBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/complete_trajectory`: `channel` must be the trajectory's own, where it is given; with fewer than `min_steps`
    steps it stays open, and the answer says `too_few`."""

    reward: float | None = None
    channel: str | None = None
    min_steps: int = 0


class FailTrajectoryBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/fail_trajectory`: why it failed, as `headrace pool show` will tell it."""

    reason: str


class TrajectoryStatesBody(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /trajectories`: trajectories of a channel, by their uids."""

    trajectory_uids: list[str]
    channel: str | None = None


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
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


class StepBody(msgspec.Struct, forbid_unknown_fields=True):
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


class SubmitStepsBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/submit_steps`: all are taken, or none."""

    steps: list[StepBody]


class ComputeRewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/compute_reward`: the ids of a prompt and an answer, or a trajectory's conversation. `dataset_fields` are the
    row's, `extra_fields` what a flow adds to them."""

    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    dataset_fields: dict[str, Any] | None = None
    extra_fields: dict[str, Any] | None = None
    num_turns: int | None = None
    trajectory_uid: str | None = None
    messages: list[Any] | None = None


class PolicyVersionBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/policy_version`: of all servers, or of one; of the default model, or of a named one. `adapter` is the name of
    the LoRA adapter that this version is sampled with; None: the served model itself."""

    version: int
    server: str | None = None
    model: str | None = None
    adapter: str | None = None


class DropSessionBody(msgspec.Struct, forbid_unknown_fields=True):
    """What workers tell each other: a trajectory that they must read from the pool again."""

    trajectory_uid: str


class ServerBody(msgspec.Struct, forbid_unknown_fields=True):
    """`/servers`: a rollout server to add or to take out."""

    address: str
    model: str | None = None
