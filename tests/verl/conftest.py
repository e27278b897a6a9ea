"""These tests run where they are asked for (HEADRACE_VERL=1): verl takes a gigabyte of disk and minutes to install.

What lies in `inside` runs in verl's own environment, started by the test out here.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: The first run waits for an installation.
TIMEOUT_S = 1800

collect_ignore = ["inside"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "verl: needs a real verl (make test-verl)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    found = [item for item in items if HERE in item.path.parents]
    for item in found:
        item.add_marker(pytest.mark.verl)
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    if found and os.environ.get("HEADRACE_VERL", "0") in ("", "0"):
        config.hook.pytest_deselected(items=found)
        items[:] = [item for item in items if HERE not in item.path.parents]
