"""Agents that run: tasks of a dataset, flows that play them through a gateway, and the rollouter that keeps them going.

Flows reach the gateway and the pool behind it over HTTP alone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.flows.black_box import BlackBoxAgentFlow
    from headrace.flows.config import AgentConfig, DataConfig
    from headrace.flows.dataset import Dataset
    from headrace.flows.flow import AgentFailed, AgentFlowBase, register
    from headrace.flows.gateway_client import GatewayClient, Generation, Handle
    from headrace.flows.rollout_config import RolloutConfig
    from headrace.flows.rollout_state import RolloutStateFile
    from headrace.flows.rollouter import AsyncRollouter, RolloutSummary
    from headrace.flows.schedule import RolloutSchedule
    from headrace.flows.schedule_state import RolloutRules
    from headrace.flows.task import Task
    from headrace.flows.turns import MultiStepFlow, SingleTurnFlow, TurnAnswer

__all__ = [
    "AgentFlowBase",
    "AgentFailed",
    "register",
    "SingleTurnFlow",
    "MultiStepFlow",
    "TurnAnswer",
    "BlackBoxAgentFlow",
    "Task",
    "Dataset",
    "GatewayClient",
    "Handle",
    "Generation",
    "AgentConfig",
    "DataConfig",
    "AsyncRollouter",
    "RolloutSummary",
    "RolloutSchedule",
    "RolloutRules",
    "RolloutStateFile",
    "RolloutConfig",
]

_HOME = {
    "AgentFlowBase": "flow",
    "AgentFailed": "flow",
    "register": "flow",
    "SingleTurnFlow": "turns",
    "MultiStepFlow": "turns",
    "TurnAnswer": "turns",
    "BlackBoxAgentFlow": "black_box",
    "Task": "task",
    "Dataset": "dataset",
    "GatewayClient": "gateway_client",
    "Handle": "gateway_client",
    "Generation": "gateway_client",
    "AgentConfig": "config",
    "DataConfig": "config",
    "AsyncRollouter": "rollouter",
    "RolloutSummary": "rollouter",
    "RolloutSchedule": "schedule",
    "RolloutRules": "schedule_state",
    "RolloutStateFile": "rollout_state",
    "RolloutConfig": "rollout_config",
}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used: the processes of agents import none of it."""
    if name not in _HOME:
        raise AttributeError(f"module 'headrace.flows' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headrace.flows.{_HOME[name]}"), name)
