"""Items that an item leaves behind: harder questions, to be rolled out later."""

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer


class BacklogEnv(BaseEnv):
    name = "backlog"

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=2), [APIServerConfig(model_name="scripted", api_key="x")]

    async def setup(self):
        self.left = [{"a": 1, "depth": 0}, {"a": 2, "depth": 0}]

    async def get_next_item(self):
        return self.left.pop(0) if self.left else None

    async def collect_trajectories(self, item):
        chat = [{"role": "user", "content": f"What is {item['a']} + {item['depth']}?"}]
        answer = await self.server.chat_completion(messages=chat, n=self.config.group_size, max_tokens=8)
        said = [choice.message.content for choice in answer.choices]
        made = [tokenize_for_trainer(self.tokenizer, [*chat, {"role": "assistant", "content": one}]) for one in said]
        group = ScoredDataGroup(
            tokens=[one["tokens"] for one in made],
            masks=[one["masks"] for one in made],
            scores=[float(one == str(item["a"] + item["depth"])) for one in said],
            group_overrides={},
        )
        return group, [{"a": item["a"], "depth": item["depth"] + 1}] if item["depth"] < 2 else []

    async def evaluate(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    BacklogEnv.cli()
