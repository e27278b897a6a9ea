"""`atroposlib.envs.server_handling.vllm_server`."""

from headrace.compat.atropos.envs.server_handling.server_baseline import APIServer, APIServerConfig
from headrace.envs.server import VLLMServer

__all__ = ["APIServer", "APIServerConfig", "VLLMServer"]
