"""`atroposlib.type_definitions`."""

from headrace.envs.types import (
    UUID,
    AgentHistory,
    AgentStep,
    Content,
    EvaluationConfigGeneral,
    EvaluationMetrics,
    EvaluationResults,
    EvaluationSample,
    GameHistory,
    GameStep,
    Item,
    Message,
    Observation,
    number,
)

__all__ = [
    "UUID",
    "AgentHistory",
    "AgentStep",
    "Content",
    "EvaluationConfigGeneral",
    "EvaluationMetrics",
    "EvaluationResults",
    "EvaluationSample",
    "GameHistory",
    "GameStep",
    "Item",
    "Message",
    "Observation",
    "number",
]
