from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.gateway.kit import Running
from tests.gateway.live.kit import IDLE_S, Clock
from tests.gateway.rollout import Rollout, in_front

from headrace import DataPool


@pytest.fixture
def rollout(rollout: Rollout) -> Rollout:
    """No two of its answers are alike."""
    rollout.reply = lambda asked: f"answer {len(rollout.orders)}"
    return rollout


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(rollout: Rollout, folder: Path, pool: DataPool, clock: Clock) -> Iterator[Running]:
    with in_front(rollout, folder, pool, open=True, session_idle_s=IDLE_S, clock=clock) as found:
        yield found
