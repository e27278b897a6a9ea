from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.api.kit import Api, api_on

from headrace import DataPool


@pytest.fixture
def api(pool: DataPool) -> Iterator[Api]:
    """A Trajectory API on an empty pool."""
    with api_on(pool) as found:
        yield found
