"""`ConversationEnv`: environments whose rollout is one conversation, played alike for training and for evaluation.

An author writes `setup`, `get_next_item`, `play` and `held_out`. In training, `play` speaks to a managed conversation,
which keeps the tokens; in an evaluation, to the servers themselves, at temperature 0.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import Field

from headrace.envs.base import BaseEnv
from headrace.envs.config import BaseEnvConfig
from headrace.envs.server import ChatCompletion, GatewayServer
from headrace.envs.server.responses import ChatCompletionMessage
from headrace.envs.types import Item, ScoredDataItem

Messages = list[dict[str, Any]]


class Speaker(Protocol):
    """Who a conversation is held with."""

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion: ...


class ConversationConfig(BaseEnvConfig):
    answer_tokens: int = Field(512, ge=1, description="most tokens of one answer")
    temperature: float = Field(1.0, ge=0, description="temperature of rollouts; evaluations have 0")
    eval_items: int = Field(32, ge=1, description="items of an evaluation")
    seed: int = Field(0, description="what items are drawn by")


class ConversationEnv(BaseEnv):
    env_config_cls = ConversationConfig
    config: ConversationConfig

    @abstractmethod
    async def play(self, server: Speaker, item: Item, **sampling: Any) -> tuple[Messages, float]:
        """One conversation about the item, and its score."""

    @abstractmethod
    def held_out(self) -> Sequence[Item]:
        """The items of an evaluation, the same ones every time."""

    async def said(self, server: Speaker, messages: Messages, **asked: Any) -> ChatCompletionMessage:
        """The model's next message."""
        answer = await server.chat_completion(messages=messages, max_tokens=self.config.answer_tokens, **asked)
        return answer.choices[0].message

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem, list[Item]]:
        tokenizer = self.tokenizer if self.needs_tokenizer else None
        async with self.server.managed_server(tokenizer=tokenizer) as managed:
            messages, score = await self.play(managed, item, temperature=self.config.temperature)
            # A template that rewrites earlier turns leaves several sequences; the last one ends in the last answer.
            sampled = managed.get_state()["nodes"][-1]
        return ScoredDataItem(
            tokens=sampled.tokens,
            masks=sampled.masked_tokens,
            inference_logprobs=sampled.logprobs,
            scores=score,
            messages=messages,  # type: ignore[typeddict-item] # tools' messages have more keys
        ), []

    @property
    def needs_tokenizer(self) -> bool:
        """A managed conversation needs it, except on a gateway, which renders for itself."""
        return not all(isinstance(server, GatewayServer) for server in self.server.servers)

    @property
    def needs_server(self) -> bool:
        return True

    async def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        began, places = time.time(), asyncio.Semaphore(self.config.max_eval_workers)

        async def one(item: Item) -> dict[str, Any]:
            async with places:
                messages, score = await self.play(self.server, item, temperature=0.0, split="eval")
            return {"messages": messages, "score": score}

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in self.held_out()]
        samples = [task.result() for task in tasks]
        metrics = {"eval/score": sum(sample["score"] for sample in samples) / len(samples)}
        await self.evaluate_log(metrics, samples=samples, start_time=began, end_time=time.time())
        return metrics
