"""`EnvConformance`: what must hold of every environment, as tests that an author's test class inherits.

class TestMine(EnvConformance):
    env_cls = MyEnv

    def say(self, asked, chance):                       # a model in the place of one
        return chance.choice(["The answer is 4.", "No idea."])

Neither a model, a trainer nor a network is needed. `fields` overrides the configuration of `config_init`; `tokenizer`
returns another one than that of bytes; `make_env` is there for environments that are built otherwise. The functions
`check_…` each assert one property of a group, with a message that names the place.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
import random
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import orjson
import pytest

from headrace.data.errors import shown
from headrace.data.scored import read_group
from headrace.envs.base import BaseEnv
from headrace.envs.groups import BY_TOKEN, check_group, check_result
from headrace.envs.server import APIServerConfig, ServerManager
from headrace.envs.server.sequences import MASKED
from headrace.envs.testing.fakes import FakeModel, FakeModelServer, FakeTrainer, byte_tokenizer
from headrace.envs.types import BaseEnvConfig

T = TypeVar("T")

#: By how much a log-prob may exceed 0: float32 sums of probabilities exceed 1 by about so much.
LOG_PROB_TOLERANCE = 1e-3

WORDS = ["yes", "no", "1", "2", "3", "4", "5", "higher", "lower", "the answer is", "not sure", "because"]


class EnvConformance:
    """The tests that an environment must pass: a subclass names it (`env_cls`), and pytest runs them."""

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
        """The environment of this configuration; override it where it takes more."""
        return self.env_cls(config, server_configs)

    # How the tests are made.

    @pytest.fixture(autouse=True)
    def _apart(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The working directory is the test's own folder."""
        monkeypatch.chdir(tmp_path)

    def made(self) -> tuple[BaseEnv, FakeModel]:
        """An environment with a fake model in the place of its servers; the same every time."""
        random.seed(self.seed)
        np.random.seed(self.seed)
        config, servers = self.env_cls.config_init()
        quiet = {"use_wandb": False, "status_poll_s": 0.005, "ensure_scores_are_not_same": False}
        config = config.model_copy(update={**quiet, **self.fields})
        env = self.make_env(config, servers)
        model = FakeModel(self.say, self.tokenizer(), self.seed)
        env.tokenizer = model.tokenizer
        name = APIServerConfig(model_name="model")
        env.server = ServerManager([name], server_class=partial(FakeModelServer, model))
        return env, model

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end."""
        return asyncio.run(work)

    async def rolled_out(self, env: BaseEnv) -> list[tuple[Any, list[dict[str, Any]]]]:
        """Items, each with its groups; at least one group in all."""
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

    def groups(self) -> tuple[list[dict[str, Any]], BaseEnv, FakeModel]:
        """The groups of `items` items, with the environment that made them and its model."""
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
            check_shape(group, env.config.group_size)
            read_group(orjson.dumps(group, option=orjson.OPT_SERIALIZE_NUMPY))

    def test_what_is_trained_on_is_what_the_model_said(self) -> None:
        groups, env, model = self.groups()
        for group in groups:
            for at, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True)):
                check_masks(tokens, masks, at)
                check_roles(tokens, masks, at, env.tokenizer, model.said)

    def test_its_log_probs_are_one_a_token(self) -> None:
        groups, _, _ = self.groups()
        for group in groups:
            check_log_probs(group)

    def test_the_same_seed_gives_the_same_rollouts(self) -> None:
        first, second = (self.run(self.rolled_out(self.made()[0])) for _ in range(2))
        for (item, groups), (other, others) in zip(first, second, strict=True):
            assert comparable(item) == comparable(other), "two runs with one seed got different items"
            for key in ("tokens", "masks", "scores"):
                ours, theirs = ([comparable(group[key]) for group in made] for made in (groups, others))
                assert ours == theirs, f"two runs with one seed made groups with different {key}"

    def test_it_evaluates(self) -> None:
        async def evaluated() -> BaseEnv:
            env, _ = self.made()
            await env.setup()
            await env.evaluate()
            await env.close()
            return env

        env = self.run(evaluated())
        assert not env.counts.failed, f"it failed in part: {dict(env.counts.failed)}\n{env.counts.tracebacks[-1]}"

    def test_it_works_for_a_trainer_and_leaves_nothing_behind(self) -> None:
        async def worked() -> tuple[FakeTrainer, BaseEnv, set[asyncio.Task[Any]]]:
            env, _ = self.made()
            # An environment ends when the trainer is past the last step; evaluations have a test of their own.
            env.config.total_steps, env.config.steps_per_eval = self.items - 1, 10**9
            env.api = trainer = FakeTrainer(self.items)
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


def check_shape(group: dict[str, Any], group_size: int) -> None:
    """Lists have one entry per sequence, token ids are numbers, messages have role and content."""
    check_group(group, group_size)
    count = len(group["tokens"])
    for at, tokens in enumerate(group["tokens"]):
        assert len(tokens), f"tokens[{at}] is empty"
        wrong = next((token for token in tokens if isinstance(token, bool) or not _is_id(token)), None)
        assert wrong is None, f"tokens[{at}] holds {shown(wrong)}, which is no token id"
    for key in ("messages", "overrides", "images", *BY_TOKEN):
        value = group.get(key)
        if value is not None and len(value):
            assert len(value) == count, f"{key} has {len(value)} entries for {count} sequences"
    for at, chat in enumerate(group.get("messages") or ()):
        for message in chat:
            assert {"role", "content"} <= set(message), (
                f"messages[{at}] holds {shown(message)}, without role or content"
            )


def check_masks(tokens: Sequence[int], labels: Sequence[int], at: int) -> None:
    """A label is its token or -100; some token is trained on, but not the first, before which there is no prompt."""
    for place, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        assert label in (token, MASKED), (
            f"masks[{at}][{place}] is {label}; it must be the token, {token}, or -100 where that is not trained on"
        )
    assert any(label != MASKED for label in labels), f"masks[{at}] is -100 throughout: nothing is trained on"
    assert labels[0] == MASKED, f"masks[{at}][0] is trained on: a prompt comes before what the model says"


def check_roles(tokens: Sequence[int], labels: Sequence[int], at: int, tokenizer: Any, said: Sequence[str]) -> None:
    """Every run of trained tokens is the text of an answer, or part of one; special tokens are ignored."""
    pairs = zip(tokens, labels, strict=True)
    for trained, run in itertools.groupby(pairs, key=lambda pair: pair[1] != MASKED):
        if not trained:
            continue
        text = tokenizer.decode([int(token) for token, _ in run], skip_special_tokens=True).strip()
        assert any(text in answer for answer in said), (
            f"sequence {at} is trained on {shown(text)}, which the model did not say; mask what others said with -100"
        )


def check_log_probs(group: dict[str, Any]) -> None:
    """Fields by token are as long as the tokens; `inference_logprobs` are 1.0 where masked, and log-probs elsewhere."""
    for key in BY_TOKEN:
        for at, values in enumerate(group.get(key) or ()):
            length = len(group["tokens"][at])
            assert len(values) == length, f"{key}[{at}] has {len(values)} entries for {length} tokens"
    for at, values in enumerate(group.get("inference_logprobs") or ()):
        for place, (value, label) in enumerate(zip(values, group["masks"][at], strict=True)):
            if label == MASKED:
                assert value == 1.0, f"inference_logprobs[{at}][{place}] is {value}; it must be 1.0 where it is masked"
            else:
                assert -math.inf < value <= LOG_PROB_TOLERANCE, (
                    f"inference_logprobs[{at}][{place}] is {value}, which is no log-prob of a token that is trained on"
                )


def comparable(value: Any) -> Any:
    """A value that compares by its content, arrays included."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value]
    return value


def _is_id(token: Any) -> bool:
    return isinstance(token, int | np.integer) and int(token) >= 0
