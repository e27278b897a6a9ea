"""An environment as an author would write it, with a file of its own to run."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from headrace.envs import BaseEnv, BaseEnvConfig
from headrace.envs.server import APIServerConfig


class WordConfig(BaseEnvConfig):
    words: list[str] = Field(["yes", "no"], description="what may be said")
    prompt: str = "Say {word}."
    most: int | None = Field(None, description="items that there are")


class WordEnv(BaseEnv):
    """Say a word. Every other rollout of a group says the right one."""

    name = "words"
    env_config_cls = WordConfig
    config: WordConfig

    @classmethod
    def config_init(cls) -> tuple[WordConfig, list[APIServerConfig]]:
        servers = [
            APIServerConfig(model_name="small", base_url="http://127.0.0.1:9/v1", api_key="secret", health_check=False)
        ]
        return WordConfig(group_size=2, max_num_workers=4, status_poll_s=0.01, use_wandb=False), servers

    async def setup(self) -> None:
        self.begun = self.made = 0

    async def get_next_item(self) -> int | None:
        if self.config.most is not None and self.begun >= self.config.most:
            return None
        self.begun += 1
        return self.begun

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        self.made += 1
        word = self.config.words[self.made % 2]
        said = [{"role": "user", "content": self.config.prompt}, {"role": "assistant", "content": word}]
        return {"tokens": [1, 2, item], "masks": [-100, 2, item], "scores": self.made % 2, "messages": said}, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        samples = [{"word": word, "score": 1.0} for word in self.config.words]
        await self.evaluate_log({"eval/right": 0.75}, samples=samples, generation_parameters={"temperature": 0.5})


if __name__ == "__main__":
    WordEnv.cli()
