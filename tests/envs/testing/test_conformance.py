"""The kit that authors inherit: good environments pass all of it, and each fault is found by the test that names it."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.envs.testing import environments
from tests.envs.testing.environments import Sums, Whole

from headrace.envs import BaseEnv
from headrace.envs.testing import EnvConformance


def example() -> Any:
    """The module of examples/env_sums.py."""
    path = Path(__file__).parents[3] / "examples" / "env_sums.py"
    spec = importlib.util.spec_from_file_location("env_sums", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestConversations(EnvConformance):
    env_cls = Sums


class TestGroupsAtOnce(EnvConformance):
    env_cls = Whole


class TestTheExample(EnvConformance):
    """As its page says."""

    env_cls = example().SumsEnv

    def say(self, asked: str, chance: random.Random) -> str:
        return f"It is {chance.randint(2, 18)}."


FAULTS = [
    ("NotAsync", "test_it_keeps_the_contract", "get_next_item must be an async method"),
    ("TextInTokens", "test_its_groups_have_the_right_shape", "no token id"),
    ("NotANumber", "test_its_groups_have_the_right_shape", "finite"),
    ("TrainsOnThePrompt", "test_what_is_trained_on_is_what_the_model_said", "did not say"),
    ("WrongLabels", "test_what_is_trained_on_is_what_the_model_said", "it must be the token"),
    ("ShortLogProbs", "test_its_log_probs_are_one_a_token", "entries for"),
    ("ZerosWhereMasked", "test_its_log_probs_are_one_a_token", "1.0 where it is masked"),
    ("Unseeded", "test_the_same_seed_gives_the_same_rollouts", "different items"),
    ("Raises", "test_it_evaluates", "no evaluation"),
    ("FailsAnItem", "test_it_evaluates", "no second item"),
    ("LeavesWork", "test_it_works_for_a_trainer_and_leaves_nothing_behind", "forgotten"),
    ("FailsOnce", "test_it_works_for_a_trainer_and_leaves_nothing_behind", "cleaned too well"),
]


@pytest.mark.parametrize(("fault", "test", "said"), FAULTS, ids=[fault for fault, _, _ in FAULTS])
def test_a_fault_is_found_and_named(
    fault: str, test: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kit(EnvConformance):
        env_cls: type[BaseEnv] = getattr(environments, fault)

    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, ValueError, RuntimeError), match=said):
        getattr(Kit(), test)()


def test_every_test_of_the_kit_has_a_fault_that_only_it_finds() -> None:
    assert {test for _, test, _ in FAULTS} == {name for name in dir(EnvConformance) if name.startswith("test_")}
