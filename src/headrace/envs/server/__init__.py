"""Rollout servers as environments use them: `self.server` is a `ServerManager`.

answer = await self.server.chat_completion(messages=[...], n=4, max_tokens=64)
prompt, ids, log_probs, reasons = await self.server.tokens_and_logprobs_completion(prompt="...", n=4)
async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
    answer = await managed.chat_completion(messages=messages)     # turn after turn
    (node,) = managed.get_state()["nodes"]                        # its tokens, masked_tokens and logprobs
"""

from headrace.envs.server.api_server import APIServer
from headrace.envs.server.config import (
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
    ServerManagerConfig,
)
from headrace.envs.server.engine_servers import SGLangServer, TrlVllmServer, VLLMServer
from headrace.envs.server.gateway import GatewayServer, GatewaySession
from headrace.envs.server.harness import DummyManagedServer, ServerHarness, create_chat_completion, create_completion
from headrace.envs.server.managed import ManagedServer, ManagedServerAdapter
from headrace.envs.server.manager import ServerManager
from headrace.envs.server.openai_server import OpenAIServer
from headrace.envs.server.responses import (
    ChatCompletion,
    NoServerAvailable,
    NoTokenizer,
    NoTokens,
    RequestRefused,
    ServerError,
    TextCompletion,
    Unavailable,
)
from headrace.envs.server.sequences import SequenceNode, new_group

__all__ = [
    "ServerManager",
    "ServerManagerConfig",
    "ServerBaseline",
    "APIServerConfig",
    "OpenaiConfig",
    "ReasoningConfig",
    "APIServer",
    "OpenAIServer",
    "VLLMServer",
    "SGLangServer",
    "TrlVllmServer",
    "GatewayServer",
    "ServerHarness",
    "create_chat_completion",
    "create_completion",
    "ManagedServer",
    "GatewaySession",
    "DummyManagedServer",
    "ManagedServerAdapter",
    "SequenceNode",
    "ChatCompletion",
    "TextCompletion",
    "ServerError",
    "Unavailable",
    "RequestRefused",
    "NoTokens",
    "NoServerAvailable",
    "NoTokenizer",
    "new_group",
]
