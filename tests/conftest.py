"""Fixtures that more than one capability's tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and no verdict by the clock of a busy machine.
settings.register_profile("headrace", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """A small Ray cluster on this machine, for the whole run; its address."""
    import ray

    started = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="default")
    yield started.address_info["gcs_address"]
    ray.shutdown()
