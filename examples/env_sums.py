"""An environment in one file: sums, and a point for the right one.

python env_sums.py process --env.total_steps 20 --openai.base_url http://localhost:8001/v1 --openai.model_name tiny \
    --openai.server_type vllm
"""

from __future__ import annotations

import random
import re
from typing import Any

from pydantic import Field

from headrace.envs import BaseEnv, BaseEnvConfig, Item, ScoredDataItem


class SumsConfig(BaseEnvConfig):
    largest: int = Field(99, ge=1, description="largest number in a sum")
    answer_tokens: int = Field(16, ge=1, description="most tokens of an answer")


class SumsEnv(BaseEnv):
    """Sums of two numbers. The answer's last number counts: one point where it is right."""

    name = "sums"
    env_config_cls = SumsConfig
    config: SumsConfig

    async def setup(self) -> None:
        self.random = random.Random(0)

    async def get_next_item(self) -> Item:
        return self.random.randint(0, self.config.largest), self.random.randint(0, self.config.largest)

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem, list[Item]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            messages, score = await self.answered(managed, item, temperature=1.0)
            (sampled,) = managed.get_state()["nodes"]
        return ScoredDataItem(
            tokens=sampled.tokens,
            masks=sampled.masked_tokens,
            inference_logprobs=sampled.logprobs,
            scores=score,
            messages=messages,
        ), []

    async def answered(self, server: Any, item: Item, **sampling: Any) -> tuple[list[Any], float]:
        messages = [{"role": "user", "content": f"What is {item[0]} + {item[1]}? Answer with the number alone."}]
        answer = await server.chat_completion(messages=messages, max_tokens=self.config.answer_tokens, **sampling)
        said = answer.choices[0].message.content or ""
        numbers = re.findall(r"\d+", said)
        return [*messages, {"role": "assistant", "content": said}], float(numbers[-1:] == [str(sum(item))])

    def gold_answer(self, item: Item) -> str:
        """For `probe`, which cannot tell it from the two numbers."""
        return str(sum(item))

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        samples = []
        for item in ((1, 1), (12, 30), (45, 54)):
            messages, score = await self.answered(self.server, item, temperature=0.0, split="eval")
            samples.append({"messages": messages, "score": score})
        right = sum(sample["score"] for sample in samples) / len(samples)
        await self.evaluate_log({"eval/right": right}, samples=samples)


if __name__ == "__main__":
    SumsEnv.cli()
