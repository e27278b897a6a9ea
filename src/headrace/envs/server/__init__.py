"""Rollout servers as environments use them: `self.server` is a `ServerManager`.

answer = await self.server.chat_completion(messages=[...], n=4, max_tokens=64)
prompt, ids, log_probs, reasons = await self.server.tokens_and_logprobs_completion(prompt="...", n=4)
async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
    answer = await managed.chat_completion(messages=messages)     # turn after turn
    (node,) = managed.get_state()["nodes"]                        # its tokens, masked_tokens and logprobs
"""

from headrace.envs.server.adapter import ManagedServerAdapter
from headrace.envs.server.answers import ChatCompletion, Completion
from headrace.envs.server.baseline import APIServer
from headrace.envs.server.config import APIServerConfig, OpenaiConfig, ServerBaseline, ServerManagerConfig
from headrace.envs.server.dummy import DummyManagedServer
from headrace.envs.server.errors import NoServer, NoTokenizer, NoTokens, RequestRefused, ServerError, Unavailable
from headrace.envs.server.gateway_server import GatewayServer
from headrace.envs.server.gateway_session import GatewaySession
from headrace.envs.server.harness import ServerHarness, create_chat_completion, create_completion
from headrace.envs.server.managed import ManagedServer
from headrace.envs.server.manager import ServerManager
from headrace.envs.server.openai_server import OpenAIServer
from headrace.envs.server.reasoning import ReasoningConfig
from headrace.envs.server.sequences import SequenceNode
from headrace.envs.server.sglang_server import SGLangServer
from headrace.envs.server.trl_server import TrlVllmServer
from headrace.envs.server.uids import new_group
from headrace.envs.server.vllm_server import VLLMServer

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
    "Completion",
    "ServerError",
    "Unavailable",
    "RequestRefused",
    "NoTokens",
    "NoServer",
    "NoTokenizer",
    "new_group",
]
