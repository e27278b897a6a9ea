"""A group at once: one call with n answers, tokenised anew."""

import random
from typing import Dict, List, Optional, Tuple

from atroposlib.envs.base import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    EvalHandlingEnum,
    Item,
    ScoredDataGroup,
)
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from pydantic import Field


class SumsConfig(BaseEnvConfig):
    largest: int = Field(default=9, description="Largest number")


class SumsEnv(BaseEnv):
    name = "sums"
    env_config_cls = SumsConfig

    def __init__(self, config: SumsConfig, server_configs, slurm=True, testing=False):
        super().__init__(config, server_configs, slurm, testing)
        self.percent_correct_buffer = list()

    @classmethod
    def config_init(cls) -> Tuple[SumsConfig, List[APIServerConfig]]:
        env_config = SumsConfig(
            group_size=4,
            max_token_length=64,
            eval_handling=EvalHandlingEnum.LIMIT_TRAIN,
            eval_limit_ratio=0.1,
            a_field_of_another_version=True,
        )
        server = APIServerConfig(
            model_name="scripted", base_url="http://localhost:9001/v1", api_key="x", temperature=0.7
        )
        return env_config, [server]

    async def setup(self):
        self.random = random.Random(0)
        self.iter = 0

    async def get_next_item(self) -> Item:
        self.iter += 1
        return {"a": self.iter, "b": self.random.randint(0, self.config.largest)}

    async def collect_trajectories(self, item: Item) -> Tuple[Optional[ScoredDataGroup], List[Item]]:
        messages = [
            {"role": "system", "content": "You add."},
            {"role": "user", "content": f"What is {item['a']} + {item['b']}?"},
        ]
        completions = await self.server.chat_completion(
            messages=messages, n=self.config.group_size, max_tokens=self.config.max_token_length, temperature=1.0
        )
        to_score = list()
        for choice in completions.choices:
            chat = tuple([*messages, {"role": "assistant", "content": choice.message.content}])
            to_score.append((chat, item["a"] + item["b"], choice.finish_reason))
        return await self.score(to_score), []

    async def score(self, rollouts: List) -> Optional[ScoredDataGroup]:
        scores = ScoredDataGroup()
        scores["tokens"] = list()
        scores["masks"] = list()
        scores["scores"] = list()
        for chat, right, finish_reason in rollouts:
            out = tokenize_for_trainer(self.tokenizer, list(chat), finish_reason=finish_reason)
            scores["tokens"].append(out["tokens"])
            scores["masks"].append(out["masks"])
            scores["scores"].append(1.0 if chat[-1]["content"].strip() == str(right) else -1.0)
        for score in scores["scores"]:
            self.percent_correct_buffer.append(max(score, 0))
        return scores

    async def evaluate(self, *args, **kwargs):
        return {"eval/nothing": 0.0}

    async def wandb_log(self, wandb_metrics: Optional[Dict] = None):
        if wandb_metrics is None:
            wandb_metrics = {}
        wandb_metrics["train/percent_correct"] = sum(self.percent_correct_buffer) / max(
            1, len(self.percent_correct_buffer)
        )
        self.percent_correct_buffer = list()
        await super().wandb_log(wandb_metrics)


if __name__ == "__main__":
    SumsEnv.cli()
