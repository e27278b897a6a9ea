"""Fixtures that more than one capability's tests need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.gym import environment as gym

# The same examples in every run, and no verdict by the clock of a busy machine.
settings.register_profile("headrace", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gym: needs the real reasoning-gym (make test-gym)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs reasoning-gym runs where it is asked for (HEADRACE_GYM=1): it is built from source."""
    found = [item for item in items if item.get_closest_marker("gym")]
    if not found:
        return
    if os.environ.get("HEADRACE_GYM", "0") in ("", "0"):
        config.hook.pytest_deselected(items=found)
        items[:] = [item for item in items if not item.get_closest_marker("gym")]
    elif reason := gym.lacking():
        for item in found:
            item.add_marker(pytest.mark.skip(reason=reason))
    else:
        gym.provide()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A small Ray cluster on this machine, for the whole run; its address."""
    import ray

    started = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="default")
    yield started.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `tiny`: random weights, a tokenizer and a template with tools."""
    return _tiny(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return _tiny(tmp_path_factory.mktemp("other"), seed=1)


def _tiny(folder: Path, *, seed: int) -> Path:
    from headrace.engine import tiny  # with torch, which most tests do without

    tiny.build(folder, seed=seed)
    return folder
