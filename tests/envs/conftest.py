from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.envs.api import Api


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    found = Api()
    await found.start()
    yield found
    await found.stop()
