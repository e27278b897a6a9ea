"""An environment between the real engine and the real Trajectory API, with a trainer that takes batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.atropos.words import registration
from tests.engine.kit import Client
from tests.envs.kit import CountingEnv, running
from tests.gateway.kit import serving

from headrace import DataPool
from headrace.api.app import create_app
from headrace.api.settings import TrajectoryApiSettings
from headrace.envs import APIServerConfig, BaseEnv, BaseEnvConfig
from headrace.pool.scored.types import Registration

KEY = "a key"
BATCH, GROUP, STEPS = 8, 4, 3


class AskingEnv(BaseEnv):
    """Every rollout is the model's own tokens; every other one scores."""

    name = "asking"

    async def setup(self) -> None:
        self.next = 0
        self.sampled: dict[int, list[list[int]]] = {}
        self.evaluated: list[int] = []

    async def get_next_item(self) -> int:
        self.next += 1
        return self.next

    async def collect_trajectories(self, item: int) -> tuple[Any, list[Any]]:
        prompt, answers, log_probs, _ = await self.server.tokens_and_logprobs_completion(
            prompt=f"item {item}:", n=self.config.group_size, max_tokens=6, temperature=1.0
        )
        self.sampled[item] = answers
        return {
            "tokens": [[*prompt, *answer] for answer in answers],
            "masks": [[-100] * len(prompt) + answer for answer in answers],
            "scores": [float(number % 2) for number in range(len(answers))],
            "inference_logprobs": [[1.0] * len(prompt) + found for found in log_probs],
            "generation_params": {"item": item},
        }, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.evaluated.append(self.curr_step)


@pytest.fixture
def engine(engine: Client) -> str:
    """The base_url of a real engine."""
    return f"http://{engine.host}/v1"


@pytest.fixture
def api() -> Iterator[str]:
    with DataPool() as pool, serving(create_app(pool, TrajectoryApiSettings(api_key=KEY))) as address:
        yield address


async def train(session: aiohttp.ClientSession, steps: int) -> list[list[dict[str, Any]]]:
    """The next batches, asked for until they are there."""
    taken: list[list[dict[str, Any]]] = []
    while len(taken) < steps:
        async with session.get("/batch") as answer:
            found = (await answer.json())["batch"]
        if found:
            taken.append(found)
    return taken


async def test_batches_of_exact_tokens_until_the_steps_are_done(api: str, engine: str, folder: Path) -> None:
    config = BaseEnvConfig(
        rollout_server_url=api,
        rollout_server_key=KEY,
        group_size=GROUP,
        max_num_workers=3,
        status_poll_s=0.02,
        total_steps=STEPS,
        max_batches_offpolicy=1,  # so that it sees every step: more batches in line would be the end of its work
        steps_per_eval=2,
        tokenizer_name=str(folder),
        use_wandb=False,
    )
    env = AskingEnv(config, [APIServerConfig(base_url=engine, model_name="tiny", server_type="vllm")])
    async with aiohttp.ClientSession(api, headers={"authorization": f"Bearer {KEY}"}) as session:
        async with session.post("/register", json=registration(batch_size=BATCH, num_steps=STEPS)) as answer:
            assert answer.status == 200
        async with session.get("/batch") as answer:  # with which the trainer has begun
            assert await answer.json() == {"batch": None}
        work = asyncio.create_task(env.env_manager())
        try:
            batches = await train(session, STEPS)
        finally:
            await work
        async with session.get("/status-env", json={"env_id": env.env_id}) as answer:
            status = await answer.json()
    for batch in batches:
        assert sum(len(group["scores"]) for group in batch) == BATCH
        for group in batch:
            answers = env.sampled[group["generation_params"]["item"]]
            assert [tokens[-len(answer) :] for tokens, answer in zip(group["tokens"], answers, strict=True)] == answers
            assert [list(map(len, rows)) for rows in (group["masks"], group["inference_logprobs"])] == [
                list(map(len, group["tokens"]))
            ] * 2
    assert status["current_step"] == STEPS
    assert env.counts.failed == {}
    assert len(env.evaluated) == 1


async def test_an_environment_whose_groups_fit_no_batch_is_told_so_and_pauses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "headrace.envs")
    with DataPool() as pool, serving(create_app(pool)) as address:
        pool.desk_register(msgspec.convert(registration(batch_size=12), Registration))
        pool.desk_batch()
        fields = {"group_size": 8, "max_num_workers": 1, "max_batches_offpolicy": 2, "total_steps": 1}
        env = CountingEnv(BaseEnvConfig(rollout_server_url=address, use_wandb=False, status_poll_s=0.01, **fields))
        async with running(env):
            while pool.desk_status().dead_letters != {"unmatched": 4} or env.manager is None or not env.manager.held:
                await asyncio.sleep(0.01)
        assert pool.desk_status().dead_letters == {"unmatched": 4}, "the first beyond what may wait, two batches of 12"
    told = [record.message for record in caplog.records if record.name == "headrace.envs"]
    assert any("no groups make up its 8 sequences to batch_size 12" in line for line in told)
    assert any(line.startswith("paused") for line in told)
    assert not any("steps are done" in line for line in told)
