"""`EnvConformance`: what must hold of every environment, as tests that an author's test class inherits.

class TestMine(EnvConformance):
    env_cls = MyEnv

    def say(self, asked, chance):                       # a model in the place of one
        return chance.choice(["The answer is 4.", "No idea."])

Neither a model, a trainer nor a network is needed. `fields` overrides the configuration of `config_init`; `tokenizer`
returns another one than that of bytes; `make_env` is there for environments that are built otherwise.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import orjson
import pytest

from headrace.data.scored import read_group
from headrace.envs.base import BaseEnv
from headrace.envs.groups import check_result
from headrace.envs.server import APIServerConfig, ServerManager
from headrace.envs.testing import checks
from headrace.envs.testing.model import Model, ModelServer
from headrace.envs.testing.tokenizer import byte_tokenizer
from headrace.envs.testing.trainer import Trainer
from headrace.envs.types import BaseEnvConfig

T = TypeVar("T")

WORDS = ["yes", "no", "1", "2", "3", "4", "5", "higher", "lower", "the answer is", "not sure", "because"]


class EnvConformance:
    env_cls: ClassVar[type[BaseEnv]]
    #: Overrides of the environment's own configuration.
    fields: ClassVar[dict[str, Any]] = {}
    seed: ClassVar[int] = 7
    #: How many items are rolled out by the tests that look at groups.
    items: ClassVar[int] = 2
    #: Seconds after which an environment that sends nothing is given up.
    patience_s: ClassVar[float] = 120.0

    # What an author may say.

    def say(self, asked: str, chance: random.Random) -> str:
        """What the model answers to all that was asked so far."""
        return " ".join(chance.choices(WORDS, k=chance.randint(1, 6)))

    def tokenizer(self) -> Any:
        """The tokenizer of the environment and the model."""
        return byte_tokenizer()

    def make_env(self, config: BaseEnvConfig, server_configs: Any) -> BaseEnv:
        return self.env_cls(config, server_configs)

    # How the tests are made.

    @pytest.fixture(autouse=True)
    def _apart(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever an environment writes goes to a folder of the test's."""
        monkeypatch.chdir(tmp_path)

    def made(self) -> tuple[BaseEnv, Model]:
        """An environment with a model in the place of its servers; the same one every time."""
        random.seed(self.seed)
        np.random.seed(self.seed)
        config, servers = self.env_cls.config_init()
        quiet = {"use_wandb": False, "status_poll_s": 0.005, "ensure_scores_are_not_same": False}
        config = config.model_copy(update={**quiet, **self.fields})
        env = self.make_env(config, servers)
        model = Model(self.say, self.tokenizer(), self.seed)
        env.tokenizer = model.tokenizer
        name = APIServerConfig(model_name="model")
        env.server = ServerManager([name], server_class=partial(ModelServer, model))
        return env, model

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(work)

    async def rolled_out(self, env: BaseEnv) -> list[tuple[Any, list[dict[str, Any]]]]:
        """Items, each with the groups that came of it; a list of at least one group in all."""
        await env.setup()
        found = []
        for _ in range(self.items):
            item = env.backlog.pop() if env.backlog else await env.get_next_item()
            assert item is not None, "get_next_item() gave None where it was asked for its first items"
            collected, later = check_result(await env.collect_trajectories(item), "collect_trajectories")
            env.backlog.extend(later)
            groups = await env.postprocess_histories(collected) if collected else None
            listed: list[Any] = groups if isinstance(groups, list) else [groups]
            found.append((item, [group for group in listed if group is not None]))
            await env.cleanup()
        await env.close()
        assert any(groups for _, groups in found), f"no group came of {self.items} items; set `items` or `say`"
        return found

    def groups(self) -> tuple[list[dict[str, Any]], BaseEnv, Model]:
        env, model = self.made()
        return [group for _, groups in self.run(self.rolled_out(env)) for group in groups], env, model

    # What must hold.

    def test_it_keeps_the_contract(self) -> None:
        assert issubclass(self.env_cls, BaseEnv), f"{self.env_cls.__name__} must inherit from BaseEnv"
        for name in ("setup", "get_next_item", "evaluate", "collect_trajectory", "collect_trajectories", "cleanup"):
            assert inspect.iscoroutinefunction(getattr(self.env_cls, name)), f"{name} must be an async method"
        own = self.env_cls.collect_trajectory, self.env_cls.collect_trajectories
        base = BaseEnv.collect_trajectory, BaseEnv.collect_trajectories
        assert own != base, "it must define collect_trajectory or collect_trajectories"
        config, _ = self.env_cls.config_init()
        wanted = self.env_cls.env_config_cls
        assert isinstance(config, wanted), f"config_init() must give a {wanted.__name__}, as env_config_cls says"
        again = wanted.model_validate_json(config.model_dump_json())
        assert again == config, "its configuration does not survive being written to a file"

    def test_its_groups_have_the_right_shape(self) -> None:
        groups, env, _ = self.groups()
        for group in groups:
            checks.shape(group, env.config.group_size)
            read_group(orjson.dumps(group, option=orjson.OPT_SERIALIZE_NUMPY))

    def test_what_is_trained_on_is_what_the_model_said(self) -> None:
        groups, env, model = self.groups()
        for group in groups:
            for at, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
                checks.masks(tokens, masks, at)
                checks.roles(tokens, masks, at, env.tokenizer, model.said)

    def test_its_log_probs_are_one_a_token(self) -> None:
        groups, _, _ = self.groups()
        for group in groups:
            checks.log_probs(group)

    def test_the_same_seed_gives_the_same_rollouts(self) -> None:
        first, second = (self.run(self.rolled_out(self.made()[0])) for _ in range(2))
        for (item, groups), (other, others) in zip(first, second, strict=True):
            assert checks.plain(item) == checks.plain(other), "two runs with one seed got different items"
            for key in ("tokens", "masks", "scores"):
                ours, theirs = ([checks.plain(group[key]) for group in made] for made in (groups, others))
                assert ours == theirs, f"two runs with one seed made groups with different {key}"

    def test_it_evaluates(self) -> None:
        async def evaluated() -> None:
            env, _ = self.made()
            await env.setup()
            await env.evaluate()
            await env.close()

        self.run(evaluated())

    def test_it_works_for_a_trainer_and_leaves_nothing_behind(self) -> None:
        async def worked() -> tuple[Trainer, BaseEnv, set[asyncio.Task[Any]]]:
            env, _ = self.made()
            # An environment ends when the trainer is past the last step; evaluations have a test of their own.
            env.config.total_steps, env.config.steps_per_eval = self.items - 1, 10**9
            env.api = trainer = Trainer(self.items)
            async with asyncio.timeout(self.patience_s):
                await env.env_manager()
            left = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
            return trainer, env, left

        trainer, env, left = self.run(worked())
        assert not trainer.refused, f"the Trajectory API would refuse a group: {trainer.refused[0]}"
        assert len(trainer.received) >= self.items, f"only {len(trainer.received)} groups were sent"
        assert all(math.isfinite(score) for group in trainer.received for score in group["scores"])
        assert not env.counts.failed, f"it failed on the way: {dict(env.counts.failed)}\n{env.counts.tracebacks[-1]}"
        assert trainer.left, "it did not disconnect"
        assert not left, f"it left work running behind its end: {sorted(task.get_name() for task in left)}"
