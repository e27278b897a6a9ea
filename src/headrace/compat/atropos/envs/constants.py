"""`atroposlib.envs.constants`."""

from headrace.envs.settings import ENV as ENV_NAMESPACE
from headrace.envs.settings import OPENAI as OPENAI_NAMESPACE

__all__ = ["ENV_NAMESPACE", "NAMESPACE_SEP", "OPENAI_NAMESPACE", "SERVER_MANAGER_NAMESPACE"]

SERVER_MANAGER_NAMESPACE = "server"
NAMESPACE_SEP = "."
