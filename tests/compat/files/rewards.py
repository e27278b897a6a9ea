"""Reward functions by name, applied to raw rollouts by postprocess_histories."""

import importlib.util  # noqa: F401 (the registry of atroposlib 0.4.0 needs it to be imported by someone)
from typing import Any, List

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.reward_fns import CombinedReward, RewardFunction, registry
from atroposlib.envs.reward_fns.r1_reward import R1Reward
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from atroposlib.utils.tool_call_parser import parse_tool_call


@registry.register
class ShortReward(RewardFunction):
    def compute(self, completions: List[Any], **kwargs) -> List[float]:
        return [1.0 / (1 + len(self.get_content(completion))) for completion in completions]


class RewardsConfig(BaseEnvConfig):
    reward_functions: List[Any] = ["format", {"type": "repetition_penalty", "weight": 0.5}, "short"]


class RewardsEnv(BaseEnv):
    name = "rewards"
    env_config_cls = RewardsConfig

    @classmethod
    def config_init(cls):
        return RewardsConfig(), [APIServerConfig(model_name="scripted", api_key="x")]

    async def setup(self):
        self.reward = CombinedReward(rewards=self.config.reward_functions, normalization="sum", weight=2.0)
        self.r1 = R1Reward()
        self.asked = 0

    async def get_next_item(self):
        self.asked += 1
        return (f"What is {self.asked} + 3?", str(self.asked + 3))

    async def collect_trajectories(self, item):
        chat = [{"role": "user", "content": item[0]}]
        answer = await self.server.chat_completion(messages=chat, n=self.config.group_size, max_tokens=64)
        return [([*chat, {"role": "assistant", "content": one.message.content}], item) for one in answer.choices], []

    async def postprocess_histories(self, trajectories):
        completions = [chat[-1] for chat, _ in trajectories]
        combined = self.reward(completions)
        right = self.r1(completions, solution=trajectories[0][1][1])
        called = [float(parse_tool_call(chat[-1]["content"])[2]) for chat, _ in trajectories]
        made = [tokenize_for_trainer(self.tokenizer, chat, include_messages=True) for chat, _ in trajectories]
        group = ScoredDataGroup()
        for key in ("tokens", "masks", "messages"):
            group[key] = [one[key] for one in made]
        group["scores"] = [sum(parts) for parts in zip(combined, right, called)]
        return group

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    RewardsEnv.cli()
