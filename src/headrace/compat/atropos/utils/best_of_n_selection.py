"""`atroposlib.utils.best_of_n_selection`."""

from __future__ import annotations

from collections.abc import Sequence


def select_best_index(
    primary_scores: Sequence[float],
    secondary_scores: Sequence[float],
    primary_higher_is_better: bool = True,
    secondary_lower_is_better: bool = True,
) -> int:
    """The first index with the best primary score and, among equals, the best secondary one."""
    if not primary_scores or not secondary_scores:
        raise ValueError("there are no scores to select by")
    if len(primary_scores) != len(secondary_scores):
        raise ValueError(f"there are {len(primary_scores)} primary scores and {len(secondary_scores)} secondary ones")
    first = 1 if primary_higher_is_better else -1
    second = -1 if secondary_lower_is_better else 1
    keys = [(first * one, second * two) for one, two in zip(primary_scores, secondary_scores, strict=True)]
    return keys.index(max(keys))
