"""`atroposlib.envs.server_handling.sglang_server`."""

from headrace.compat.atropos.envs.server_handling.server_baseline import APIServer, APIServerConfig
from headrace.envs.server import SGLangServer

__all__ = ["APIServer", "APIServerConfig", "SGLangServer"]
