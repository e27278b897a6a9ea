"""What environments, their servers and the Trajectory API hand to each other, by the names that environments use."""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal, Required

from typing_extensions import TypedDict

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
    total_evaluation_time_seconds: str
    model_name: str | None
    generation_parameters: dict[str, Any]


class EvaluationResults(TypedDict):
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
