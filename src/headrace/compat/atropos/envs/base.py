"""`atroposlib.envs.base`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace.compat.atropos.envs.constants import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE
from headrace.compat.atropos.envs.server_handling.server_baseline import (
    APIServer,
    APIServerConfig,
    ReasoningConfig,
    ServerBaseline,
)
from headrace.compat.atropos.envs.server_handling.server_manager import ServerManager, ServerManagerConfig
from headrace.compat.atropos.lenient import Lenient
from headrace.compat.atropos.utils.metrics import get_std_min_max_avg
from headrace.envs import base, types
from headrace.envs.types import UUID, EvalHandlingEnum, Item, Message, ScoredDataGroup, ScoredDataItem

__all__ = [
    "ENV_NAMESPACE",
    "NAMESPACE_SEP",
    "OPENAI_NAMESPACE",
    "UUID",
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "EvalHandlingEnum",
    "Item",
    "Message",
    "OpenaiConfig",
    "ReasoningConfig",
    "ScoredDataGroup",
    "ScoredDataItem",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "get_std_min_max_avg",
]

OpenaiConfig = APIServerConfig


class BaseEnvConfig(Lenient, types.BaseEnvConfig):
    """`headrace.envs.BaseEnvConfig` that ignores unknown fields, with a warning."""


class BaseEnv(base.BaseEnv):
    """`headrace.envs.BaseEnv` with atroposlib's default configuration."""

    env_config_cls: ClassVar[type[types.BaseEnvConfig]] = BaseEnvConfig

    @classmethod
    def config_init(cls) -> tuple[types.BaseEnvConfig, ServerBaseline | Sequence[APIServerConfig]]:
        return cls.env_config_cls(), ServerBaseline()
