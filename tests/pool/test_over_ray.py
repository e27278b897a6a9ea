"""What `make test` runs over Ray is named in one place, and what is named there exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.pool.conftest import OVER_RAY

CONFORMANCE = "\n".join(path.read_text() for path in Path(__file__).parent.rglob("test_conformance_*.py"))


@pytest.mark.parametrize("name", sorted(OVER_RAY))
def test_it_is_a_test_of_the_conformance_suite(name: str) -> None:
    assert f"def {name}(" in CONFORMANCE
