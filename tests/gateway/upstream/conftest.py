from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.upstream.kit import Puppet

from headrace.tokens.vocabulary import Vocabulary, load_vocabulary


@pytest.fixture(scope="session")
def vocabulary(folder: Path) -> Vocabulary:
    return load_vocabulary(folder)


@pytest.fixture
async def puppet() -> AsyncIterator[Callable[..., Any]]:
    """Makes puppets, and ends them with the test."""
    made: list[Puppet] = []

    async def make(**answers: Any) -> Puppet:
        made.append(await Puppet(**answers).start())
        return made[-1]

    yield make
    for found in made:
        await found.stop()
