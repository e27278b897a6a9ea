"""Losses, advantages and filters by their names: those that ship, and functions of a user's own, `FILE.py:FUNCTION`.

A function of a user's own is called on a tiny batch when a run starts, before a model is loaded and before anything is
fetched: what raises, returns another shape, is not finite or has no gradient ends the run there, with the file, the
line and what would be right.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.data.errors import InvalidInput, shown
from headrace.data.packing import pack
from headrace.data.step import Step
from headrace.data.trajectory import Trajectory
from headrace.data.tree import TokenTree
from headrace.files import nearest
from headrace.targets import load_target
from headrace.trainer.advantages import ADVANTAGES, AdvantageBatch, Floats
from headrace.trainer.config import AlgorithmConfig, FilterConfig
from headrace.trainer.filters import FILTERS, Bools, FilterFunction, FilterGroup
from headrace.trainer.losses import LOSSES, LossBatch, LossFunction, Metrics

#: Says of a group which of its trajectories are learned from.
Keeps = Callable[[FilterGroup], Bools]

LOSS_RETURNS = (
    "a loss returns one number, a tensor of shape () such as -(batch.weights * batch.advantages * batch.log_probs)"
    ".sum(), or that and a mapping of metrics"
)
ADVANTAGE_RETURNS = (
    "an advantage returns a list with one array a group: of one number a trajectory, or of one array a trajectory with "
    "a number a step"
)
FILTER_RETURNS = "a filter returns whether the group is learned from: one bool, or an array with one a trajectory"
#: How far the losses of two passes may be, relative to their size, from that of one pass over both: rounding.
SUM_TOLERANCE = 1e-4


@cache
def _own(target: str) -> Callable[..., Any]:
    """The function that `FILE.py:FUNCTION` names; relative files are below the working directory. First called at the
    start of a run: importing is not for its threads."""
    found = load_target(target, Path.cwd())
    if not callable(found):
        raise InvalidInput(f"{target} is {shown(found)}; it should be a function")
    function: Callable[..., Any] = found
    return function


def loss_of(algorithm: AlgorithmConfig) -> LossFunction:
    """The loss that a configuration names."""
    return LOSSES[algorithm.loss] if algorithm.loss in LOSSES else _own(algorithm.loss)


def is_own(name: str) -> bool:
    """Whether a name in a configuration is that of a user's function."""
    return ":" in name


def loss_value(batch: LossBatch, function: LossFunction) -> tuple[Tensor, Metrics]:
    """What a loss says of a batch: the number and the metrics. Raises `InvalidInput` where it raises, or returns
    anything else."""
    algorithm = batch.algorithm
    if not is_own(algorithm.loss):
        found: Any = function(batch)
    else:
        found = _called(algorithm.loss, function, batch, algorithm.loss_options)
    loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if not isinstance(loss, Tensor) or loss.shape != ():
        said = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else shown(loss)
        raise InvalidInput(f"loss {algorithm.loss} returned {said}; {LOSS_RETURNS}")
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise InvalidInput(f"loss {algorithm.loss} returned the metrics {shown(metrics)}; they are numbers by names")
    for name, value in metrics.items():
        if not isinstance(value, Tensor | float | int):
            raise InvalidInput(
                f"loss {algorithm.loss} returned {shown(value)} as its metric {name!r}; it is a number or a tensor"
            )
    return loss, metrics


def advantages_of(batch: AdvantageBatch, algorithm: AlgorithmConfig) -> list[list[Floats]]:
    """An advantage for each step of each trajectory, group by group. Raises `InvalidInput` where a user's function
    raises, or returns anything else than one finite number for each."""
    name = algorithm.advantage
    if not is_own(name):
        return [_by_step(*pair) for pair in zip(ADVANTAGES[name](batch), batch.step_rewards, strict=True)]
    found = _called(name, _own(name), batch, algorithm.advantage_options)
    if not isinstance(found, list | tuple) or len(found) != len(batch.rewards):
        raise InvalidInput(
            f"advantage {name} returned {shown(found)} for {len(batch.rewards)} groups; {ADVANTAGE_RETURNS}"
        )
    done = []
    for rewards, steps, group in zip(batch.rewards, batch.step_rewards, found, strict=True):
        what = f"advantage {name} returned {shown(group)} for a group with rewards {shown(rewards.tolist())}"
        try:
            made = _by_step(group, steps)
        except (TypeError, ValueError):
            raise InvalidInput(f"{what}; {ADVANTAGE_RETURNS}") from None
        if not all(np.isfinite(one).all() for one in made):
            raise InvalidInput(f"{what}, which is not finite; a deviation of 0 needs an epsilon beside it")
        done.append(made)
    return done


def _by_step(group: Any, steps: list[Floats]) -> list[Floats]:
    """What was returned for one group, as an array a trajectory with a number a step. Raises `ValueError` where it is
    neither that nor a number a trajectory."""
    if len(group) != len(steps):
        raise ValueError("not one a trajectory")
    given = [np.asarray(one, np.float64) for one in group]
    if all(one.ndim == 0 for one in given):
        return [np.full(len(of), float(one)) for one, of in zip(given, steps, strict=True)]
    if any(one.shape != of.shape for one, of in zip(given, steps, strict=True)):
        raise ValueError("not one a step")
    return given


def filters_of(algorithm: AlgorithmConfig) -> list[tuple[str, Keeps]]:
    """The filters of a configuration, by the names that metrics have for them; each says of a group which of its
    trajectories it keeps. Raises `InvalidInput` for an option that a filter does not know."""
    found: list[tuple[str, Keeps]] = []
    for config in algorithm.filters:
        function: FilterFunction = FILTERS[config.use] if config.use in FILTERS else _own(config.use)
        _check_options(config.use, function, config.options)
        found.append((config.name, partial(_kept, config, function)))
    return found


def _kept(config: FilterConfig, function: FilterFunction, group: FilterGroup) -> Bools:
    said = _called(config.use, function, group, config.options)
    kept = np.asarray(said)
    if kept.dtype != np.bool_ or kept.shape not in ((), group.rewards.shape):
        raise InvalidInput(
            f"filter {config.use} returned {shown(said)} for a group of {len(group.rewards)}; {FILTER_RETURNS}"
        )
    return np.broadcast_to(kept, group.rewards.shape)


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises `InvalidInput` where a function does not take these options, or wants more."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin: calling it will tell
        return
    known = [one.name for one in list(signature.parameters.values())[1:]]
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    for option in options:
        if option not in known and not takes_any:
            there = ", ".join(known) or "none"
            raise InvalidInput(f"{name} has no option {option!r}{nearest(option, known)}; there are: {there}")
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise InvalidInput(
            f"{name} is called with one argument and its options {shown(dict(options))}: {error}"
        ) from None


def _called(name: str, function: Callable[..., Any], given: Any, options: Mapping[str, Any]) -> Any:
    """What a function returns. Whatever it raises is `InvalidInput`, with the line of its file."""
    try:
        return function(given, **options)
    except Exception as error:
        file = name.rpartition(":")[0]
        frames = traceback.extract_tb(error.__traceback__)[1:]
        # The last line of the user's own file, also where it failed in what that line called.
        own = [frame for frame in frames if frame.filename.endswith(Path(file).name)] if file else []
        at = next(reversed(own or frames), None)
        where = "" if at is None else f" ({at.filename}, line {at.lineno}: {at.line})"
        raise InvalidInput(f"{name} failed: {type(error).__name__}: {error}{where}") from error


# -- at the start of a run ---------------------------------------------------------------------------------------------


def check_functions(algorithm: AlgorithmConfig) -> None:
    """Loads the functions of a configuration and calls a user's on tiny batches. Raises `InvalidInput` where one cannot
    be loaded, raises, or returns what cannot be learned from."""
    if is_own(algorithm.loss):
        function = loss_of(algorithm)
        _check_options(algorithm.loss, function, algorithm.loss_options)
        check_loss(function, algorithm)
    if is_own(algorithm.advantage):
        _check_options(algorithm.advantage, _own(algorithm.advantage), algorithm.advantage_options)
        advantages_of(tiny_advantage_batch(), algorithm)
    for _, keeps in filters_of(algorithm):
        keeps(tiny_filter_group())


def check_loss(function: LossFunction, algorithm: AlgorithmConfig) -> None:
    """Raises `InvalidInput` where a loss is, on a tiny batch, no finite number with a finite gradient in the log-probs,
    or not the sum of what it is for each sequence alone."""
    whole = tiny_loss_batch(algorithm)
    loss, _ = loss_value(whole, function)
    name, value = algorithm.loss, float(loss.detach())
    if not math.isfinite(value):
        raise InvalidInput(f"loss {name} is {value} on a tiny batch; it must be finite")
    if not loss.requires_grad:
        raise InvalidInput(
            f"loss {name} has no gradient: it must be computed from batch.log_probs, not from a "
            "detached copy or a number of it"
        )
    (gradient,) = torch.autograd.grad(loss, whole.log_probs, allow_unused=True)
    if gradient is None or not gradient.any():
        raise InvalidInput(f"loss {name} has no gradient in batch.log_probs: nothing would be learned")
    if not torch.isfinite(gradient).all():
        raise InvalidInput(
            f"the gradient of loss {name} is {shown(gradient.tolist())} on a tiny batch; it must be finite"
        )
    parts = sum(float(loss_value(_only(whole, at), function)[0].detach()) for at in range(whole.sequences))
    if abs(parts - value) > SUM_TOLERANCE * max(abs(parts), abs(value), 1.0):
        raise InvalidInput(
            f"loss {name} is {value:.6g} for two sequences in one pass and {parts:.6g} as the sum of two passes: "
            "it must be a sum over targets (times batch.weights), not a mean, for a batch is cut into several passes"
        )


def tiny_loss_batch(algorithm: AlgorithmConfig) -> LossBatch:
    """Two sequences of four and three targets: the first as it was sampled, the other from weights that have moved."""
    log_probs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -1.5, -0.7, -3.0])
    moved = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3, -0.2, 0.1])
    old = log_probs - moved
    return LossBatch(
        log_probs=log_probs.requires_grad_(),
        old_log_probs=old,
        rollout_log_probs=old.clone(),
        importance=torch.ones(7),
        advantages=torch.tensor([1.0, 1.0, 1.0, 1.0, -0.5, -0.5, -0.5]),
        weights=torch.full((7,), 1 / 7),
        entropy=torch.full((7,), 1.25),
        sequence=torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        sequences=2,
        versions=torch.tensor([3, 3, 3, 3, 2, 2, 2]),
        version=3,
        algorithm=algorithm,
    )


def _only(batch: LossBatch, sequence: int) -> LossBatch:
    """The same with the targets of one sequence alone."""
    here = batch.sequence == sequence
    names = ("log_probs", "old_log_probs", "rollout_log_probs", "importance", "advantages", "weights", "entropy")
    cut = {name: getattr(batch, name)[here] for name in (*names, "versions")}
    return replace(batch, **cut, sequence=torch.zeros_like(batch.sequence[here]), sequences=1)


def tiny_advantage_batch() -> AdvantageBatch:
    """Three groups: of two trajectories that differ, of three that earned the same, and of one alone."""
    steps = [
        [np.array([0.0, 1.0]), np.array([0.0])],
        [np.array([0.5]), np.array([0.0, 0.5]), np.array([0.5])],
        [np.array([0.25, 0.0, 0.5])],
    ]
    return AdvantageBatch([np.array([one.sum() for one in group]) for group in steps], steps)


def tiny_filter_group() -> FilterGroup:
    """Three trajectories of one step that differ in reward, length and how they ended; without metadata."""
    found = []
    for at, (reward, tokens, finish) in enumerate(((0.0, 4, "stop"), (1.0, 9, "length"), (0.5, 2, "stop"))):
        about: dict[str, Any] = {"trajectory_uid": f"t{at}", "prompt_uid": "p", "step_index": 0, "is_last": True}
        step = Step(prompt_ids=[1], response_ids=[2] * tokens, reward=reward, finish_reason=finish, **about)
        (record,) = pack([step]).records()
        found.append(Trajectory(f"t{at}", "p", "train", True, {}, TokenTree({0: record})))
    return FilterGroup.of(found, [one.reward for one in found])
