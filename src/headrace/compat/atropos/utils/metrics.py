"""`atroposlib.utils.metrics`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def get_std_min_max_avg(name: str, data: Sequence[float], metrics_dict: dict[str, Any]) -> dict[str, Any]:
    """The metrics with mean, standard deviation, maximum and minimum of the data, under names that begin with
    `name`."""
    for what, found in {"mean": np.mean, "std": np.std, "max": np.max, "min": np.min}.items():
        metrics_dict[f"{name}_{what}"] = found(data)  # type: ignore[operator]
    return metrics_dict
