"""What an environment is configured by (`BaseEnvConfig`), and what it, its servers and the Trajectory API pass around.

The names of the types are Atropos'. A configuration refuses unknown fields, and values that cannot work.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, Required

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from headrace.files import Key

__all__ = [
    "UUID",
    "AgentHistory",
    "AgentStep",
    "Content",
    "EvalHandlingEnum",
    "EvaluationConfigGeneral",
    "EvaluationMetrics",
    "EvaluationResults",
    "EvaluationSample",
    "GameHistory",
    "GameStep",
    "Item",
    "Message",
    "Observation",
    "ScoredDataGroup",
    "ScoredDataItem",
    "number",
]

#: Whatever an environment rolls out from: a question, a state, a row of a dataset.
Item = Any
#: A message's text, or its parts (text, images) as the OpenAI dialect writes them.
Content = str | list[dict[str, Any]]
number = int | float
UUID = str


class Message(TypedDict, total=False):
    """A message of a conversation, with a reward where one belongs to it."""

    role: Required[Literal["system", "user", "assistant", "tool"]]
    content: Required[Content]
    reward: float | None


class ScoredDataItem(TypedDict, total=False):
    """One rollout. `masks` are labels: -100 where a token is not trained on, else its id."""

    tokens: Required[list[int]]
    masks: Required[list[int]]
    scores: Required[float]
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    #: As long as `tokens`, 1.0 where masked.
    inference_logprobs: list[float] | None
    messages: list[Message] | None
    generation_params: dict[str, Any] | None
    group_overrides: dict[str, Any] | None
    overrides: dict[str, Any] | None
    images: Any
    #: By position, then by rank.
    distill_token_ids: list[list[int]] | None
    distill_logprobs: list[list[float]] | None


class ScoredDataGroup(TypedDict, total=False):
    """The rollouts of one item: a list with an entry a sequence, but for the two that hold for the whole group."""

    tokens: Required[list[list[int]]]
    masks: Required[list[list[int]]]
    scores: Required[list[float]]
    advantages: list[list[float]] | None
    ref_logprobs: list[list[float]] | None
    inference_logprobs: list[list[float]] | None
    messages: list[list[Message]] | None
    generation_params: dict[str, Any] | None
    group_overrides: dict[str, Any] | None
    overrides: list[dict[str, Any]] | None
    images: Any
    distill_token_ids: list[list[list[int]]] | None
    distill_logprobs: list[list[list[float]]] | None
    env_id: int | None


class EvalHandlingEnum(Enum):
    """What becomes of training work while an evaluation runs: none is started, less is, or nothing changes."""

    STOP_TRAIN = "STOP_TRAIN"
    LIMIT_TRAIN = "LIMIT_TRAIN"
    NONE = "NONE"


class AgentStep(TypedDict, total=False):
    """One step of an agent in a game."""

    step: int
    messages: list[Message]
    reward: float


#: The steps of each agent, by its name.
AgentHistory = dict[str, list[AgentStep]]


class Observation(TypedDict):
    """What a game showed: as data, and as a model reads it."""

    raw: dict[str, Any]
    rendered: Content


class GameStep(TypedDict):
    """One step of a game: what an agent saw and did, and what came of it."""

    step: int
    agent_id: str
    observation: Observation
    action: str
    #: One number, or one by agent.
    reward: float | dict[str, float]
    done: bool
    info: dict[str, Any]


GameHistory = list[GameStep]


class EvaluationConfigGeneral(TypedDict):
    """What an evaluation ran with, and how long it took."""

    total_evaluation_time_seconds: str
    model_name: str | None
    generation_parameters: dict[str, Any]


class EvaluationResults(TypedDict):
    """An evaluation's metrics by name."""

    all: dict[str, float]


class EvaluationMetrics(TypedDict):
    """The content of an evaluation's `metrics.json`."""

    config_general: EvaluationConfigGeneral
    results: EvaluationResults


class EvaluationSample(TypedDict, total=False):
    """A line of an evaluation's `samples.jsonl`."""

    messages: list[dict[str, str]] | None
    question: str | None
    gold_answer: str | None
    gold_parsed: str | None
    model_parsed: str | None
    score: int | None
    correct: bool | None
    finish_reason: str | None
    response_after_think: str | None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class BaseEnvConfig(BaseModel):
    """Every environment's settings; an environment with more inherits from it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    group_size: int = Field(4, ge=1, description="rollouts of one item, scored together")
    max_num_workers: int = Field(-1, ge=-1, description="items at a time; -1: max_num_workers_per_node a server")
    max_eval_workers: int = Field(16, ge=1, description="evaluation tasks at a time, where `evaluate` keeps to it")
    max_num_workers_per_node: int = Field(8, ge=1, description="items at a time for each rollout server")
    steps_per_eval: int = Field(100, description="training steps between evaluations; 0 or less: none")
    max_token_length: int = Field(2048, description="most tokens of a generation")
    eval_handling: EvalHandlingEnum = Field(
        EvalHandlingEnum.STOP_TRAIN, description="what becomes of training work while an evaluation runs"
    )
    eval_limit_ratio: float = Field(0.5, ge=0, le=1, description="LIMIT_TRAIN: share of the workers that go on")
    inference_weight: float = Field(1.0, description="share of the batches relative to other environments")
    batch_size: int = Field(-1, description="sequences in a batch; the trainer's, where there is one")
    max_batches_offpolicy: int = Field(3, ge=1, description="most batches that may wait for the trainer")
    tokenizer_name: str = Field(
        "NousResearch/DeepHermes-3-Llama-3-3B-Preview", description="tokenizer: a folder, or a name on the hub"
    )
    use_wandb: bool = Field(True, description="log to wandb")
    rollout_server_url: str = Field("http://localhost:8000", description="where the Trajectory API is")
    total_steps: int = Field(1000, ge=-1, description="training steps to work for; -1: as many as the trainer says")
    wandb_name: str | None = Field(None, description="the environment's name in wandb and at the API")
    num_rollouts_to_keep: int = Field(32, ge=0, description="groups in the table of rollouts")
    num_rollouts_per_group_for_logging: int = Field(1, ge=-1, description="rollouts of each of them; -1: all")
    ensure_scores_are_not_same: bool = Field(True, description="skip groups whose scores are all equal")
    data_path_to_save_groups: str | None = Field(None, description="also write groups to this JSON lines file")
    data_dir_to_save_evals: str | None = Field(None, description="folder of evaluation results")
    min_items_sent_before_logging: int = Field(2, description="groups between two lines of metrics")
    include_messages: bool = Field(False, description="send each rollout's messages to the trainer")
    min_batch_allocation: float | None = Field(None, ge=0, le=1, description="least share of a batch that is ours")
    worker_timeout: float = Field(600, description="seconds that an item may take; 0 or less: no limit")
    thinking_mode: bool = Field(False, description="ask the model to reason")
    reasoning_effort: Effort | None = Field(None, description="how much it reasons")
    max_reasoning_tokens: int | None = Field(None, ge=1024, le=32000, description="most tokens of reasoning")
    custom_thinking_prompt: str | None = Field(
        None, description="system prompt that asks for reasoning, for an environment that uses it"
    )

    rollout_server_key: Key = Field(
        None, description="the Trajectory API's key; default: HEADRACE_ADMIN_KEY, else HEADRACE_API_KEY"
    )
    status_poll_s: float = Field(0.5, gt=0, description="seconds between looks at the API's queue")
    server_wait_s: float = Field(
        300, ge=0, description="seconds that the start waits for a rollout server to answer; then it is an error"
    )
    max_consecutive_failures: int = Field(
        -1,
        ge=-1,
        description="items in a row that may come to nothing before the environment ends with the last one's error; "
        "0: any number; -1: 16, or two for each worker where that is more",
    )
    rollout_retries: int = Field(0, ge=0, description="times that a rollout which raised is made again")
    spool_dir: str | None = Field(
        None,
        description="folder of groups that are not sent yet, sent first by the next start; default: a temporary one",
    )
    spool_max_mb: int = Field(1024, ge=1, description="most that waits there; then finished work waits for room")
    drain_s: float = Field(60, ge=0, description="seconds that the end waits for the API to take what is not sent yet")
    metrics_path: str | None = Field(None, description="JSON lines file of metrics")
    tensorboard_dir: str | None = Field(None, description="folder of metrics for TensorBoard")
