"""Fixtures that more than one capability's tests need."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.gym import environment as gym
from tests.schedule import ByFile, check_ids, longest_first

# Small models are slower with more threads than one, here and in every process that a test starts; and the machine's
# other cores have tests of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A job in a shell's background ignores Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no verdict by the clock of a busy machine.
settings.register_profile("headrace", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gym: needs the real reasoning-gym (make test-gym)")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without what is marked `long` or `gym`, unless it is asked for (HEADRACE_LONG=1, HEADRACE_GYM=1); what takes
    longest comes first."""
    check_ids(items)
    if not _asked("HEADRACE_LONG"):
        _deselect(config, items, "long")
    if not _asked("HEADRACE_GYM"):
        _deselect(config, items, "gym")
    elif found := [item for item in items if item.get_closest_marker("gym")]:
        if reason := gym.lacking():
            for item in found:
                item.add_marker(pytest.mark.skip(reason=reason))
        else:
            gym.provide()
    items[:] = longest_first(items)


def _asked(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def _deselect(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(marker)])
    items[:] = [item for item in items if not item.get_closest_marker(marker)]


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
