from __future__ import annotations

import pytest
from tests.cli.command import Command


@pytest.fixture
def headrace(capfd: pytest.CaptureFixture[str]) -> Command:
    """The command: `headrace("check-gateway", address)`."""
    return Command(capfd)
