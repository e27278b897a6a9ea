"""`atroposlib.envs.server_handling.trl_vllm_server`."""

from headrace.compat.atropos.envs.server_handling.server_baseline import APIServer, APIServerConfig
from headrace.envs.server import TrlVllmServer

__all__ = ["APIServer", "APIServerConfig", "TrlVllmServer"]
