"""`reasoning_gym`: problems without end from the package of that name, scored by its own scorers."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import Field

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.envs.conversation import (
    ChatEndpoint,
    ConversationConfig,
    ConversationEnv,
    Messages,
)
from headrace.envs.types import Item
from headrace.extras import install_command
from headrace.files import nearest

#: The package draws a problem by seed + place; held-out ones begin where training does not come to.
FAR = 1 << 30
#: Problems of one dataset: some tasks make all of them at once.
AT_ONCE = 1000


class ReasoningGymConfig(ConversationConfig):
    """Which of the package's tasks is asked, and how."""

    task: str = Field("chain_sum", description="one of the package's tasks")
    task_config: dict[str, Any] = Field(default_factory=dict, description="the task's own settings: {max_terms: 3}")
    prompt: str = Field("default", description="one of the package's system prompts")


class ReasoningGymEnv(ConversationEnv):
    """The answer stands in <answer> tags, and the task's own scorer pays for it, from 0 to 1."""

    name = "reasoning_gym"
    env_config_cls = ReasoningGymConfig
    config: ReasoningGymConfig

    async def setup(self) -> None:
        self.gym = await asyncio.to_thread(_package)
        self.system = _known(self.gym.utils.SYSTEM_PROMPTS, self.config.prompt, "prompt")
        _known(self.gym.factory.DATASETS, self.config.task, "task")
        self.testing = self.problems(self.config.seed + FAR, self.config.eval_items)
        self.next = 0

    def problems(self, seed: int, size: int) -> Any:
        """A dataset of the task; its problems are made when they are asked for."""
        try:
            return self.gym.create_dataset(self.config.task, **{**self.config.task_config, "seed": seed, "size": size})
        except (TypeError, ValueError, AssertionError) as error:
            raise InvalidInput(f"task_config does not fit {self.config.task}: {error}") from error

    async def get_next_item(self) -> Item:
        place = self.next % AT_ONCE
        if place == 0:
            self.training = self.problems(self.config.seed + self.next, AT_ONCE)
        self.next += 1
        return self.training[place]

    def held_out(self) -> list[Item]:
        return [self.testing[at] for at in range(self.config.eval_items)]

    async def play(self, server: ChatEndpoint, item: Item, **sampling: Any) -> tuple[Messages, float]:
        messages: Messages = [
            {"role": "system", "content": self.system},
            {"role": "user", "content": item["question"]},
        ]
        said = (await self.said(server, messages, **sampling)).content or ""
        answer = self.gym.utils.extract_answer(said)
        score = 0.0 if answer is None else float(await asyncio.to_thread(self.testing.score_answer, answer, item))
        return [*messages, {"role": "assistant", "content": said}], score


def _package() -> Any:
    """The package, which takes seconds to import."""
    try:
        import reasoning_gym
        import reasoning_gym.utils  # which it does not import by itself
    except ModuleNotFoundError as error:
        raise HeadraceError(f"this environment needs {error.name}: {install_command('gym')}") from error
    return reasoning_gym


def _known(among: dict[str, Any], name: str, field: str) -> Any:
    if name not in among:
        raise InvalidInput(f"{field}: reasoning_gym has no {name!r}{nearest(name, among)}")
    return among[name]
