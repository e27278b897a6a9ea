"""`atroposlib.envs.server_handling.server_harness`."""

from headrace.envs.server import ServerHarness, create_chat_completion, create_completion

__all__ = ["ServerHarness", "create_chat_completion", "create_completion"]
