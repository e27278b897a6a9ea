"""`atroposlib.envs.server_handling.server_manager`."""

from headrace.compat.atropos.envs.server_handling.server_baseline import (
    APIServer,
    APIServerConfig,
    ReasoningConfig,
    ServerBaseline,
)
from headrace.envs.server import (
    DummyManagedServer,
    ManagedServer,
    OpenAIServer,
    ServerHarness,
    ServerManager,
    ServerManagerConfig,
    SGLangServer,
    TrlVllmServer,
    VLLMServer,
)

__all__ = [
    "APIServer",
    "APIServerConfig",
    "DummyManagedServer",
    "ManagedServer",
    "OpenAIServer",
    "ReasoningConfig",
    "SGLangServer",
    "ServerBaseline",
    "ServerHarness",
    "ServerManager",
    "ServerManagerConfig",
    "TrlVllmServer",
    "VLLMServer",
]
