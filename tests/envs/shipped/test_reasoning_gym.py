"""`reasoning_gym`: the package's own problems and scores."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.data.errors import InvalidInput
from headrace.envs import APIServerConfig
from headrace.envs.reasoning_gym import ReasoningGymConfig, ReasoningGymEnv
from headrace.envs.server import ChatCompletion
from headrace.envs.testing import EnvConformance

pytestmark = pytest.mark.gym


class TestConformance(EnvConformance):
    env_cls = ReasoningGymEnv

    def say(self, asked: str, chance: random.Random) -> str:
        return chance.choice([f"<answer>{chance.randint(-99, 99)}</answer>", "who knows"])


class Parrot:
    def __init__(self, said: str) -> None:
        self.said = said

    async def chat_completion(self, **asked: Any) -> ChatCompletion:
        return ChatCompletion.model_validate({"choices": [{"message": {"content": self.said}}]})


def env_of(**fields: Any) -> ReasoningGymEnv:
    return ReasoningGymEnv(ReasoningGymConfig(**fields), [APIServerConfig(base_url="http://127.0.0.1:9/v1")])


async def test_the_packages_answer_scores_one_in_tags_and_nothing_without() -> None:
    env = env_of(task="leg_counting")
    await env.setup()
    for _ in range(5):
        item = await env.get_next_item()
        assert (await env.play(Parrot(f"So <answer>{item['answer']}</answer>"), item))[1] == 1.0
        assert (await env.play(Parrot(item["answer"]), item))[1] == 0.0


async def test_no_problem_of_an_evaluation_is_trained_on() -> None:
    env = env_of(eval_items=20)
    await env.setup()
    trained = {(await env.get_next_item())["question"] for _ in range(20)}
    assert len(trained) == 20
    assert not trained & {item["question"] for item in env.held_out()}


@pytest.mark.parametrize(
    ("fields", "because"),
    [
        ({"task": "chain_sums"}, "no 'chain_sums'; did you mean chain_sum"),
        ({"prompt": "defaults"}, "did you mean default"),
        ({"task_config": {"max_term": 3}}, "task_config does not fit chain_sum"),
        ({"task_config": {"min_terms": 9, "max_terms": 3}}, "task_config does not fit chain_sum"),
    ],
)
async def test_what_the_package_does_not_know_is_named(fields: dict[str, Any], because: str) -> None:
    with pytest.raises(InvalidInput, match=because):
        await env_of(**fields).setup()
