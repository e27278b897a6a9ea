"""`atroposlib.utils.advantages`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def allclose_to_first(
    values: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False, return_vector: bool = False
) -> Array | bool:
    """Whether all arrays are close to the first; with `return_vector`, whether each is."""
    given = np.asarray(values)
    close = np.isclose(given, given[0], rtol=rtol, atol=atol, equal_nan=equal_nan)
    each: Array = close.reshape(len(given), -1).all(axis=1)
    return each if return_vector else bool(each.all())


def compute_stats(data: Sequence[Any]) -> dict[str, float]:
    """`mean` and `var` of all numbers in nested lists. Raises `ValueError` where there are none."""
    numbers = list(_numbers(data))
    if not numbers:
        raise ValueError("there are no numbers in the data")
    mean = sum(numbers) / len(numbers)
    return {"mean": mean, "var": sum(number * number for number in numbers) / len(numbers) - mean * mean}


def compute_discounted_returns(rewards: Any, gamma: float) -> Array:
    """The return at each step: the rewards from there on, discounted by their distance."""
    given = rewards if isinstance(rewards, np.ndarray) else np.array(rewards, np.float32)
    returns = np.empty_like(given)
    following = 0.0
    for at in reversed(range(len(given))):
        following = given[at] + gamma * following
        returns[at] = following
    return returns


def compute_grpo_process_supervision_advantages(
    rewards: Sequence[Sequence[float]], gamma: float | None = None, std_tol: float = 1e-8
) -> list[Array]:
    """For each trajectory, the return at each step of its rewards, normalised over all trajectories; discounted where
    `gamma` is given. Raises `ValueError` where the rewards are all equal."""
    stats = compute_stats(rewards)
    deviation = stats["var"] ** 0.5
    if deviation < std_tol:
        raise ValueError(f"the rewards' deviation, {deviation}, is below {std_tol}: they say nothing")
    normal = [(np.array(trajectory) - stats["mean"]) / deviation for trajectory in rewards]
    if gamma is None:
        return [np.flip(np.cumsum(np.flip(trajectory))) for trajectory in normal]
    return [compute_discounted_returns(trajectory, gamma) for trajectory in normal]


def _numbers(data: Any) -> Iterator[float]:
    if isinstance(data, int | float):
        yield data
    elif isinstance(data, list):
        for inner in data:
            yield from _numbers(inner)
    else:
        raise ValueError(f"{type(data).__name__} is neither a number nor a list")
