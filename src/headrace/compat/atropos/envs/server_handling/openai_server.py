"""`atroposlib.envs.server_handling.openai_server`."""

from headrace.compat.atropos.envs.server_handling.server_baseline import APIServer, APIServerConfig
from headrace.envs.server import OpenAIServer

__all__ = ["APIServer", "APIServerConfig", "OpenAIServer", "OpenaiConfig"]

OpenaiConfig = APIServerConfig
