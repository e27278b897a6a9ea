"""`import atroposlib`, where Headrace answers to it."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from pathlib import Path

import pytest

from headrace.data.errors import HeadraceError


@pytest.fixture(autouse=True)
def _names(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are known as soon as the package is asked to make them known."""
    from headrace.compat.atropos import finder

    monkeypatch.setattr(
        sys, "meta_path", [one for one in sys.meta_path if type(one).__module__ != "headrace.compat.atropos.finder"]
    )
    finder.install()


def test_a_module_is_the_one_here_under_both_names() -> None:
    from headrace.compat.atropos.envs import base
    from headrace.envs import BaseEnv

    assert importlib.import_module("atroposlib.envs.base") is base
    assert issubclass(base.BaseEnv, BaseEnv)


def test_rewards_pay_0_on_errors_under_these_names_alone() -> None:
    from headrace.rewards import RewardFunction, r1_reward, registry

    theirs = importlib.import_module("atroposlib.envs.reward_fns")
    module = importlib.import_module("atroposlib.envs.reward_fns.r1_reward")
    assert issubclass(module.R1Reward, r1_reward.R1Reward)
    assert issubclass(module.R1Reward, theirs.RewardFunction)
    assert module.parse_reasoning_response is r1_reward.parse_reasoning_response

    def raising(completions: list[str], **kwargs: object) -> list[float]:
        raise ValueError("it always fails")

    theirs.registry.register_function("raising", raising)
    assert theirs.registry.create("raising")(["a", "b"]) == [0, 0]
    assert all(map(math.isnan, registry.create("raising")(["a", "b"])))
    assert theirs.registry.create("r1").all_zero_on_error
    assert not registry.create("r1").all_zero_on_error
    assert not RewardFunction.all_zero_on_error


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import atroposlib.api.server", r"atroposlib\.api is not covered .* `headrace api`"),
        ("from atroposlib.envs import nothing", r"atroposlib\.envs\.nothing is not covered .* run the file with"),
        ("from atroposlib.envs.base import BaseEnvv", r"atroposlib\.envs\.base\.BaseEnvv is not .* mean BaseEnv\?"),
        ("from atroposlib.envs.server_handling import proxy_client", "server_type='gateway'"),
        ("import atroposlib.finder", r"atroposlib\.finder is not covered"),
    ],
)
def test_what_is_not_covered_fails_at_import_with_its_name_and_what_to_do(line: str, said: str) -> None:
    with pytest.raises(ImportError, match=said):
        exec(line, {})


def test_a_real_one_is_never_passed_over_in_silence(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.compat.atropos import finder

    (apart / "atroposlib").mkdir()
    (apart / "atroposlib" / "__init__.py").touch()
    monkeypatch.syspath_prepend(apart)
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if not isinstance(one, finder.Finder)])
    sys.modules.pop("atroposlib", None)
    with pytest.warns(finder.Shadowing, match="is installed"):
        finder.install()
    with warnings.catch_warnings(action="error"):
        finder.install()  # once is enough
    monkeypatch.setattr(sys, "meta_path", [one for one in sys.meta_path if not isinstance(one, finder.Finder)])
    importlib.import_module("atroposlib")
    with pytest.raises(HeadraceError, match="imported already"):
        finder.install()


def test_a_field_that_is_not_known_is_passed_over_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    from headrace.compat.atropos.envs.base import APIServerConfig, BaseEnvConfig

    assert BaseEnvConfig(group_sise=8).group_size == 4  # type: ignore[call-arg]
    assert "no field group_sise; it is passed over; did you mean group_size?" in caplog.text
    assert APIServerConfig(model_name="m", temperature=1).model_name == "m"  # type: ignore[call-arg]
