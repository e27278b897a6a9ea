"""Tables of parameters: `make test` runs every value of them, or what is usual, `make test-long` every combination."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of the axes' values, for `parametrize`. The first value of an axis is its usual one: what is
    unusual in more than one of them is for the long tier."""
    rows = []
    for row in product(*map(enumerate, axes)):
        unusual = sum(at > 0 for at, _ in row)
        rows.append(pytest.param(*(value for _, value in row), marks=[pytest.mark.long] if unusual > 1 else []))
    return rows


def paired(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of axes of one length, for `parametrize`. The values at the same place on all of them stay
    together; every other combination is for the long tier."""
    assert len({len(axis) for axis in axes}) == 1
    rows = []
    for row in product(*map(enumerate, axes)):
        mixed = len({at for at, _ in row}) > 1
        rows.append(pytest.param(*(value for _, value in row), marks=[pytest.mark.long] if mixed else []))
    return rows


def usual(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of the axes' values, for `parametrize`; all but that of the first values, which are the usual
    ones, are for the long tier."""
    first, *others = product(*axes)
    return [pytest.param(*first), *(pytest.param(*row, marks=pytest.mark.long) for row in others)]
