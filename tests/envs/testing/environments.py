"""Environments for the kit: good ones in the styles that authors write, and one for every fault that it must find."""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

from headrace.envs import BaseEnv, BaseEnvConfig, ConversationEnv, ScoredDataGroup, ScoredDataItem
from headrace.envs.server import APIServerConfig


class Sums(BaseEnv):
    """Two turns a rollout, in a managed conversation."""

    name = "sums"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Any]:
        return BaseEnvConfig(group_size=3, max_num_workers=2), [APIServerConfig(base_url="http://127.0.0.1:1/v1")]

    async def setup(self) -> None:
        self.chance = random.Random(0)

    async def get_next_item(self) -> Any:
        return self.chance.randint(1, 9), self.chance.randint(1, 9)

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        messages = [{"role": "user", "content": f"{item[0]} + {item[1]}?"}]
        async with self.server.managed_server() as managed:
            for _ in range(2):
                answer = await managed.chat_completion(messages=messages, max_tokens=32)
                said = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Are you sure?"}]
            (node,) = managed.get_state()["nodes"]
        right = float(str(sum(item)) in messages[-2]["content"])
        return self.scored(node, right), []

    def scored(self, node: Any, score: float) -> ScoredDataItem:
        return {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": score,
        }

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await self.server.chat_completion(messages=[{"role": "user", "content": "1 + 1?"}], split="eval")


class Whole(Sums):
    """A group at once, from text, with items for later."""

    name = "whole"

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        prompt, ids, log_probs, _ = await self.server.tokens_and_logprobs_completion(
            prompt=f"{item[0]} + {item[1]} =", n=self.config.group_size, max_tokens=16
        )
        group: ScoredDataGroup = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": [], "messages": []}
        for at, (one, values) in enumerate(zip(ids, log_probs, strict=True)):
            group["tokens"].append(prompt + one)
            group["masks"].append([-100] * len(prompt) + one)
            group["inference_logprobs"] = [*(group["inference_logprobs"] or []), [1.0] * len(prompt) + values]
            group["scores"].append(float(at))
        del group["messages"]
        return [group, None], [item]


class TrainsOnThePrompt(Sums):
    def scored(self, node: Any, score: float) -> ScoredDataItem:
        return {"tokens": node.tokens, "masks": [-100, *node.tokens[1:]], "scores": score}


class WrongLabels(Sums):
    def scored(self, node: Any, score: float) -> ScoredDataItem:
        return {"tokens": node.tokens, "masks": [int(label != -100) for label in node.masked_tokens], "scores": score}


class ShortLogProbs(Sums):
    def scored(self, node: Any, score: float) -> ScoredDataItem:
        return {**super().scored(node, score), "inference_logprobs": node.logprobs[1:]}


class ZerosWhereMasked(Sums):
    def scored(self, node: Any, score: float) -> ScoredDataItem:
        return {**super().scored(node, score), "inference_logprobs": [0.0] * len(node.tokens)}


class TextInTokens(Sums):
    def scored(self, node: Any, score: float) -> ScoredDataItem:
        return {**super().scored(node, score), "tokens": [str(token) for token in node.tokens]}  # type: ignore[misc]


class NotANumber(Sums):
    def scored(self, node: Any, score: float) -> ScoredDataItem:
        return super().scored(node, float("nan"))


class Unseeded(Sums):
    async def setup(self) -> None:
        self.chance = random.Random(os.urandom(16))

    async def get_next_item(self) -> Any:
        return self.chance.randint(0, 10**9), self.chance.randint(0, 10**9)


class LeavesWork(Sums):
    async def setup(self) -> None:
        await super().setup()
        self.forgotten = asyncio.create_task(asyncio.Event().wait(), name="forgotten")


class Raises(Sums):
    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no evaluation")


class FailsAnItem(ConversationEnv):
    """One conversation of its evaluation fails, which the others outlive and a test of its author must not hide."""

    name = "fails_an_item"

    async def setup(self) -> None:
        pass

    async def get_next_item(self) -> Any:
        return 1

    def held_out(self) -> list[Any]:
        return [1, 2]

    async def play(self, server: Any, item: Any, **sampling: Any) -> Any:
        if item == 2:
            raise RuntimeError("no second item")
        return [{"role": "user", "content": "?"}], 1.0


class FailsOnce(Sums):
    """Its workers fail now and then, which a run outlives and a test of its author must not hide."""

    failed = False

    async def cleanup(self) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("cleaned too well")


class NotAsync(Sums):
    def get_next_item(self) -> Any:  # type: ignore[override]
        return 1, 2
