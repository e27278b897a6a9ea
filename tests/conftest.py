"""Fixtures that more than one capability's tests need."""

from __future__ import annotations

import gc
import os
import signal
import ssl
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from tests import tiers
from tests.cached import made_once
from tests.schedule import ByFile, check_ids, longest_first

from headrace import DataPool

if TYPE_CHECKING:
    from tests.engine.kit import Client

# Small models are slower with more threads than one, here and in every process that a test starts; and the machine's
# other cores have tests of their own.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray's workers would yield to everything else, by a niceness of 15: beside other tests they hardly ran, and who waits
# for them waited long.
os.environ.setdefault("RAY_worker_niceness", "0")
#: How often a cluster is started that does not come up.
RAY_STARTS = 4

# Every client makes a context for TLS, which reads all authorities anew: 60 ms, an eighth of what the gateway's
# tests took. Those that are made alike are one, and nearly all talk to this machine without TLS.
ssl.create_default_context = cache(ssl.create_default_context)

# A job in a shell's background ignores Ctrl-C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, and no verdict by the clock of a busy machine. A test that says how many examples it
# needs gets them; make test-long runs every test of a property, with more.
settings.register_profile(
    "quick", max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("quick"), max_examples=400)
settings.load_profile("long" if tiers.LONG.asked_for else "quick")


def pytest_configure(config: pytest.Config) -> None:
    tiers.declare(config)
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported and collected, a million objects, is looked through once: again and again, while it grew and at
    every full collection in a test, took a sixth of a run."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)  # markers are set here, and `-m` looks at them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without the tiers that were not asked for; what takes longest comes first."""
    check_ids(items)
    tiers.select(config, items)
    items[:] = longest_first(items)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A small Ray cluster on this machine, for the whole run; its address."""
    import ray

    # "local": whatever else runs on this machine is not joined. A node ends where its agents take more than 15 s to
    # start, as they do on a busy machine; Ray has no setting for that.
    for again in reversed(range(RAY_STARTS)):
        try:
            started = ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="default")
            break
        except Exception:
            ray.shutdown()
            if not again:
                raise
    yield started.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `tiny`: random weights, a tokenizer and a template with tools."""
    return made_once(tmp_path_factory, "tiny", lambda folder: _tiny(folder, seed=0))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return made_once(tmp_path_factory, "other", lambda folder: _tiny(folder, seed=1))


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[Client]:
    """An engine that every test may use and none may change; it records what it consumed and sampled."""
    from tests.engine.kit import rollout_engine  # with torch, which most tests do without

    with rollout_engine(folder, record=100_000) as client:
        yield client


@pytest.fixture
def own(folder: Path) -> Iterator[Client]:
    """An engine for one test, to pause and to change."""
    from tests.engine.kit import rollout_engine

    with rollout_engine(folder) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[DataPool]:
    """An empty pool in this process."""
    with DataPool() as found:
        yield found


def _tiny(folder: Path, *, seed: int) -> None:
    from headrace.engine import tiny  # with torch, which most tests do without

    tiny.build(folder, seed=seed)
