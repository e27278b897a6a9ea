"""Environments: items in, scored groups of rollouts out. See `headrace.envs.base.BaseEnv`."""

from __future__ import annotations

from headrace.envs.base import BaseEnv
from headrace.envs.conversation import ConversationConfig, ConversationEnv
from headrace.envs.server import (
    APIServer,
    APIServerConfig,
    OpenaiConfig,
    ServerBaseline,
    ServerManager,
    ServerManagerConfig,
)
from headrace.envs.types import BaseEnvConfig, EvalHandlingEnum, Item, Message, ScoredDataGroup, ScoredDataItem

__all__ = [
    "BaseEnv",
    "BaseEnvConfig",
    "ConversationEnv",
    "ConversationConfig",
    "EvalHandlingEnum",
    "Item",
    "Message",
    "ScoredDataGroup",
    "ScoredDataItem",
    "APIServer",
    "APIServerConfig",
    "OpenaiConfig",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
]
