"""Losses, advantages and filters of a user's own: what works is used, what does not is refused at the start, with the
file, the line and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.kit import pool_of
from tests.trainer.test_learner import Watched, learner, several

from headrace.data.errors import InvalidInput
from headrace.trainer import Trainer, TrainerConfig
from headrace.trainer.config import AlgorithmConfig, load, with_files_below
from headrace.trainer.examples import examples_of
from headrace.trainer.own_functions import check_functions

#: PPO's surrogate without a clip, as a user would write it.
GOOD_LOSS = """
import torch

def loss(batch, scale=1.0):
    ratio = torch.exp(batch.log_probs - batch.old_log_probs)
    return -scale * (batch.weights * ratio * batch.advantages).sum(), {"ratio": ratio, "two": 2}
"""
GOOD_ADVANTAGE = """
import numpy as np

def advantage(batch, scale=1.0):
    return [scale * (group - np.median(group)) for group in batch.rewards]

def steps(batch):
    return [[one.cumsum() for one in group] for group in batch.step_rewards]
"""
GOOD_FILTER = """
def short(group, most=5):
    return group.tokens <= most

def solved(group):
    return bool(group.rewards.max() > 0)
"""

Written = Callable[[str], str]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Writes a user's file and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / f"own_{abs(hash(text)):x}.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return batch.log_probs", r"returned a tensor of shape \(7,\); a loss returns one number"),
        ("return 0.5", r"returned 0.5; a loss returns one number"),
        ("return (batch.log_probs.sum(), 3)", "returned the metrics 3; they are numbers by names"),
        ("return (batch.log_probs.sum(), {'x': 'y'})", "returned 'y' as its metric 'x'"),
        ("return batch.log_probs.sum() / 0", "is -inf on a tiny batch; it must be finite"),
        ("return batch.log_probs.detach().sum()", r"has no gradient: it must be computed from batch\.log_probs"),
        ("return (batch.log_probs * 0).sum()", r"has no gradient in batch\.log_probs"),
        (
            "return (batch.log_probs - batch.log_probs.detach()).abs().sqrt().sum()",
            "gradient of loss .* must be finite",
        ),
        ("return -(batch.log_probs * batch.advantages).mean()", "must be a sum over targets .* not a mean"),
        ("return batch.logprobs.sum()", r"AttributeError.*'logprobs'.*line 2: return batch\.logprobs\.sum\(\)"),
        ("return inner(batch)\ndef inner(batch):\n    return 1 / 0", r"ZeroDivisionError.*line 4: return 1 / 0"),
    ],
)
def test_a_loss_that_cannot_be_learned_by_is_refused(written: Written, body: str, said: str) -> None:
    file = written(f"def loss(batch):\n    {body}\n")
    with pytest.raises(InvalidInput, match=said) as error:
        check_functions(AlgorithmConfig(loss=f"{file}:loss"))
    assert file in str(error.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 1.0", r"returned 1.0 for 3 groups; an advantage returns a list with one array a group"),
        ("return batch.rewards[:1]", "for 3 groups; an advantage returns"),
        (
            "return [group[:1] for group in batch.rewards]",
            r"for a group with rewards \[1.0, 0.0\]; an advantage returns",
        ),
        ("return [[one[:0] for one in g] for g in batch.step_rewards]", "one array a trajectory with a number a step"),
        ("return [g / g.std() for g in batch.rewards]", r"rewards \[0.5, 0.5, 0.5\], which is not finite"),
        ("return [group.means() for group in batch.rewards]", "AttributeError.*line 2"),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_advantage_of_another_shape_is_refused(written: Written, body: str, said: str) -> None:
    file = written(f"def advantage(batch):\n    {body}\n")
    with pytest.raises(InvalidInput, match=said) as error:
        check_functions(AlgorithmConfig(advantage=f"{file}:advantage"))
    assert file in str(error.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return group.rewards", r"returned array\(.*for a group of 3; a filter returns whether"),
        ("return group.rewards[:2] > 0", "for a group of 3; a filter returns whether"),
        ("return group.trajectories[0].metadata['level'] > 2", r"KeyError: 'level'.*line 2"),
    ],
)
def test_a_filter_that_says_anything_else_is_refused(written: Written, body: str, said: str) -> None:
    file = written(f"def keep(group):\n    {body}\n")
    with pytest.raises(InvalidInput, match=said):
        check_functions(AlgorithmConfig.model_validate({"filters": [f"{file}:keep"]}))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"filters": [{"use": "accuracy", "lo": 0.1}]}, "accuracy has no option 'lo'; did you mean low"),
        ({"filters": ["min_reward"]}, "min_reward is called with one argument .* 'at_least'"),
        ({"loss": "FILE:loss", "loss_options": {"scael": 2}}, "has no option 'scael'; did you mean scale"),
        ({"loss": "FILE:loos"}, "has no 'loos'; did you mean loss"),
        ({"loss": "FILE:torch"}, "it should be a function"),
        ({"loss": "nowhere/mine.py:loss"}, r"there is no file .*nowhere/mine\.py"),
    ],
)
def test_what_is_not_there_is_named(written: Written, given: dict[str, Any], said: str) -> None:
    file = written(GOOD_LOSS)
    whole = {name: value.replace("FILE", file) if isinstance(value, str) else value for name, value in given.items()}
    with pytest.raises(InvalidInput, match=said):
        check_functions(AlgorithmConfig.model_validate(whole))


def test_files_are_below_the_folder_of_the_configuration(tmp_path: Path) -> None:
    below = tmp_path / "project"
    below.mkdir()
    (below / "train.yaml").write_text(
        "model: m\nrun: r\nalgorithm: {loss: mine.py:loss, advantage: ../a.py:f, filters: [f.py:keep, overlong]}\n"
    )
    found = load(below / "train.yaml").algorithm
    assert found.loss == f"{below}/mine.py:loss"
    assert found.advantage == f"{tmp_path}/a.py:f"
    assert [one.use for one in found.filters] == [f"{below}/f.py:keep", "overlong"]
    assert with_files_below({"loss": "pkg.module:loss"}, tmp_path) == {"loss": "pkg.module:loss"}


def test_a_users_loss_is_learned_by_in_several_passes_as_in_one(model: Path, written: Written) -> None:
    seen = []
    algorithm = {"loss": f"{written(GOOD_LOSS)}:loss", "loss_options": {"scale": 2.0}}
    for tokens in (4096, 16):
        mine = learner(model, algorithm=algorithm, optimizer={"tokens": tokens})
        mine.optimizer = watched = Watched(mine.policy.parameters(), lr=0)
        told = mine.learn(several(), 0, 0)
        assert told["loss_two"] == 2
        assert told["loss_ratio"] == pytest.approx(told["ratio_mean"], rel=1e-5)
        assert watched.seen is not None
        seen.append(watched.seen)
    assert torch.allclose(*seen, atol=1e-6)
    plain = learner(model, algorithm={"clip": 1.0, "clip_high": 1e6})
    plain.optimizer = watched = Watched(plain.policy.parameters(), lr=0)
    plain.learn(several(), 0, 0)
    assert watched.seen is not None
    assert torch.allclose(2 * watched.seen, seen[0], atol=1e-6)


def test_a_users_loss_learns_by_a_critics_advantages(model: Path, written: Written) -> None:
    mine = learner(model, algorithm={"loss": f"{written(GOOD_LOSS)}:loss", "advantage": "gae"})
    told = mine.learn(several(reward=1.0), 0, 0)
    assert told["grad_norm"] > 0
    assert {"value_loss", "loss_ratio"} <= set(told)


@pytest.mark.parametrize("loss", ["gspo", "cispo", "sft", "tis", "ppo"])
def test_passes_of_every_loss_add_up_to_one(model: Path, loss: str) -> None:
    seen = []
    for tokens in (4096, 16):
        mine = learner(model, algorithm={"loss": loss, "clip": 0.2}, optimizer={"tokens": tokens})
        mine.optimizer = watched = Watched(mine.policy.parameters(), lr=0)
        mine.learn(several(), 0, 0)
        assert watched.seen is not None
        assert watched.seen.any()
        seen.append(watched.seen)
    assert torch.allclose(*seen, atol=1e-6)


def test_a_users_advantages_reach_every_token_and_those_that_came_with_it_win(written: Written) -> None:
    config = AlgorithmConfig.model_validate(
        {"advantage": f"{written(GOOD_ADVANTAGE)}:advantage", "advantage_options": {"scale": 3.0}}
    )
    batch = pool_of([[0.0, 1.0, 5.0]]).fetch_batch(1, timeout=0)
    assert batch is not None
    found = examples_of(batch.groups, config).sequences
    rows = [one.advantages[one.loss_mask] for one in found if one.advantages is not None]
    assert [set(row.tolist()) for row in rows] == [{-3.0}, {0.0}, {12.0}]
    said = {"scored_group": True, "advantages": list(range(7))}
    batch = pool_of([[0.0, 1.0, 5.0]], metadata=said).fetch_batch(1, timeout=0)
    assert batch is not None
    for one in examples_of(batch.groups, config).sequences:
        assert one.advantages is not None
        assert one.advantages.tolist() == [0, 0, 0, 3, 4, 5, 6]


def test_a_users_advantages_may_be_one_a_step(written: Written) -> None:
    config = AlgorithmConfig(advantage=f"{written(GOOD_ADVANTAGE)}:steps")
    batch = pool_of([[0.0, 1.0]], turns=2).fetch_batch(1, timeout=0)
    assert batch is not None
    first, second = examples_of(batch.groups, config).sequences
    assert first.advantages is not None
    assert second.advantages is not None
    assert not first.advantages.any()
    assert [float(second.advantages[span.start]) for span in second.spans] == [0.0, 1.0]


def test_a_users_filter_is_counted_by_its_name(written: Written, model: Path, tmp_path: Path) -> None:
    file = written(GOOD_FILTER)
    config = TrainerConfig.model_validate(
        {
            "model": model,
            "run": tmp_path / "run",
            "steps": 1,
            "pool": {"batch_size": 2},
            "algorithm": {"filters": [{"use": f"{file}:short", "most": 3}, f"{file}:solved"]},
        }
    )
    trainer = Trainer(config, pool=pool_of([[0.0, 1.0], [0.0, 2.0]], vocabulary=300))
    trainer.run()
    assert trainer.outcome.skipped.counts["filtered_short"] == 4
    assert trainer.outcome.skipped.counts["filtered_solved"] == 0
    assert "4 trajectories by the filter short" in trainer.outcome.sentences()[1]


def test_a_run_with_a_bad_function_ends_before_the_model_is_loaded(written: Written, tmp_path: Path) -> None:
    config = TrainerConfig(
        model=Path("nobody/nothing"), run=tmp_path / "run", algorithm=AlgorithmConfig(loss=f"{written('')}:loss")
    )
    with pytest.raises(InvalidInput, match="has no 'loss'"):
        Trainer(config, pool=pool_of([[0.0, 1.0]]))
    assert not (tmp_path / "run").exists()
