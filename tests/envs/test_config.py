"""Every setting of an environment has the contract's default; those that a run reads do what they say."""

from __future__ import annotations

from typing import Any

import pytest
from tests.envs.api import Api
from tests.envs.kit import SERVER, CountingEnv, config, running

from headrace.envs import APIServerConfig, BaseEnvConfig, OpenaiConfig
from headrace.envs.types import EvalHandlingEnum

DEFAULTS: dict[str, Any] = {
    "group_size": 4,
    "max_num_workers": -1,
    "max_eval_workers": 16,
    "max_num_workers_per_node": 8,
    "steps_per_eval": 100,
    "max_token_length": 2048,
    "eval_handling": EvalHandlingEnum.STOP_TRAIN,
    "eval_limit_ratio": 0.5,
    "inference_weight": 1.0,
    "batch_size": -1,
    "max_batches_offpolicy": 3,
    "use_wandb": True,
    "rollout_server_url": "http://localhost:8000",
    "total_steps": 1000,
    "wandb_name": None,
    "num_rollouts_to_keep": 32,
    "num_rollouts_per_group_for_logging": 1,
    "ensure_scores_are_not_same": True,
    "data_path_to_save_groups": None,
    "data_dir_to_save_evals": None,
    "min_items_sent_before_logging": 2,
    "include_messages": False,
    "min_batch_allocation": None,
    "worker_timeout": 600,
    "thinking_mode": False,
    "reasoning_effort": None,
    "max_reasoning_tokens": None,
    "custom_thinking_prompt": None,
}


def test_the_defaults_are_those_of_the_contract() -> None:
    assert BaseEnvConfig().model_dump(include=set(DEFAULTS)) == DEFAULTS
    assert BaseEnvConfig().tokenizer_name
    assert OpenaiConfig is APIServerConfig


@pytest.mark.parametrize(("fields", "workers"), [({}, 8), ({"max_num_workers_per_node": 3}, 3)])
def test_without_a_number_of_workers_each_server_has_some(fields: dict[str, Any], workers: int) -> None:
    assert CountingEnv(BaseEnvConfig(**fields)).max_num_workers == workers
    assert CountingEnv(BaseEnvConfig(**fields), servers=[SERVER] * 2).max_num_workers == 2 * workers
    assert CountingEnv(BaseEnvConfig(max_num_workers=5, **fields), servers=[SERVER] * 2).max_num_workers == 5


async def test_what_the_api_is_told_of_an_environment_is_what_it_is_set_to(api: Api) -> None:
    fields = {"inference_weight": 2.5, "min_batch_allocation": 0.25, "max_token_length": 77}
    async with running(CountingEnv(config(api, **fields))):
        await api.until(lambda: bool(api.environments))
    told = api.environments[0]
    assert (told["weight"], told["min_batch_allocation"], told["max_token_length"]) == (2.5, 0.25, 77)


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, None),
        ({"thinking_mode": True}, {"reasoning": {"enabled": True}}),
        ({"reasoning_effort": "high"}, {"reasoning": {"enabled": True, "effort": "high"}}),
        ({"max_reasoning_tokens": 2000}, {"reasoning": {"enabled": True, "max_tokens": 2000}}),
    ],
)
def test_reasoning_is_asked_for_as_configured(fields: dict[str, Any], asked: dict[str, Any] | None) -> None:
    env = CountingEnv(BaseEnvConfig(**fields))
    assert env.server.servers[0].reasoning_config.build_extra_body(SERVER.base_url) == asked


@pytest.mark.parametrize("included", [False, True])
async def test_messages_are_made_of_tokens_where_they_are_to_be_included(api: Api, included: bool) -> None:
    class Words:
        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    async def play(item: int) -> dict[str, Any]:
        return {"tokens": [1, 2], "masks": [-100, 2], "scores": 1.0}

    env = CountingEnv(config(api, include_messages=included, ensure_scores_are_not_same=False), most=1)
    env.tokenizer, env.play = Words(), play
    async with running(env):
        await api.until(lambda: len(api.received) == 1)
    found = [[{"role": "user", "content": "1 2"}]] * 2
    assert api.received[0]["messages"] == (found if included else [])


async def test_a_row_of_metrics_comes_with_a_step_for_which_enough_was_sent(api: Api) -> None:
    class Telling(CountingEnv):
        rows = 0

        async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
            self.rows += 1

    env = Telling(config(api, min_items_sent_before_logging=3), most=2)
    async with running(env):
        await api.until(lambda: env.items_sent_this_step == 2)
        api.step = 1
        await api.until(lambda: env.curr_step == 1)
        assert env.rows == 0
        env.most = 3
        await api.until(lambda: env.items_sent_this_step == 3)
        api.step = 2
        await api.until(lambda: env.rows == 1)
    assert env.rows == 1, "nothing was sent since, so that the end has nothing to tell"
