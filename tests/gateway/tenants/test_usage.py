"""What tenants use is counted once, however many processes count."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.tenants.test_tenants import Clock, written

from headrace.gateway.config_files import read_tenants
from headrace.gateway.counters import GatewayCounters
from headrace.gateway.errors import Refusal
from headrace.gateway.tenants import Tenant
from headrace.gateway.usage import UsageTable

WORKERS, PATIENCE_S = 3, 240


@pytest.fixture
def clock() -> Clock:
    return Clock()


def in_each(tmp: Path, clock: Clock, **bounds: Any) -> list[Tenant]:
    """The same tenant, the second of two, as each of several workers knows it."""
    spec = read_tenants(written(tmp, {"a": {"keys": ["k"], **bounds}}))["a"]
    UsageTable.create(tmp / "usage", 2, WORKERS)
    tables = [UsageTable(2, workers=WORKERS, worker=at, path=tmp / "usage") for at in range(WORKERS)]
    return [Tenant("a", spec, GatewayCounters(), clock, table.row(1)) for table in tables]


def why_refused(tenant: Tenant) -> str:
    with pytest.raises(Refusal) as found, tenant.admitted():
        pass
    return str(found.value)


def test_requests_under_way_count_in_whichever_worker_they_are(tmp_path: Path, clock: Clock) -> None:
    first, second, third = in_each(tmp_path, clock, concurrency=2)
    with first.admitted():
        with second.admitted():
            for tenant in (first, second, third):
                assert tenant.in_flight == 2
                assert "2 of its requests are under way, of 2" in why_refused(tenant)
        with third.admitted():
            assert first.in_flight == 2
    assert [tenant.in_flight for tenant in (first, second, third)] == [0, 0, 0]


def test_a_rate_and_tokens_are_those_of_all_workers_together(tmp_path: Path, clock: Clock) -> None:
    first, second, third = in_each(tmp_path, clock, calls_per_s=2, burst=3, tokens_per_s=10)
    for tenant in (first, second, third):
        with tenant.admitted():
            pass
    assert all("2 requests a second" in why_refused(tenant) for tenant in (first, second, third))
    clock.now += 0.5
    with second.admitted():
        second.used(600, 100)
    assert "2 requests a second" in why_refused(first) or "10 tokens" in why_refused(first)
    clock.now += 1
    assert "10 tokens a second" in why_refused(third)
    clock.now += 10
    with third.admitted():
        pass


def test_what_a_worker_that_died_had_under_way_is_forgotten(tmp_path: Path, clock: Clock) -> None:
    first, second, _ = in_each(tmp_path, clock, concurrency=1)
    with ExitStack() as died:
        died.enter_context(first.admitted())
        why_refused(second)
        UsageTable(2, workers=WORKERS, path=tmp_path / "usage").clear(2, 0)
        with second.admitted():
            assert second.in_flight == 1
        died.pop_all()  # it never comes to its end


TAKES_MANY = """
import sys, time
from pathlib import Path
from headrace.gateway.config_files import TenantSpec
from headrace.gateway.counters import GatewayCounters
from headrace.gateway.errors import Refusal
from headrace.gateway.tenants import Tenant
from headrace.gateway.usage import UsageTable
table = UsageTable(2, workers=3, worker=int(sys.argv[1]), path=Path(sys.argv[2]))
spec = TenantSpec(keys=["k"], calls_per_s=1e-6, burst=300)
tenant = Tenant("a", spec, GatewayCounters(), time.monotonic, table.row(1))
taken = 0
for _ in range(1000):
    try:
        with tenant.admitted():
            taken += 1
    except Refusal:
        pass
print(taken)
"""


def test_processes_that_count_at_once_let_no_more_through_than_there_are(tmp_path: Path) -> None:
    UsageTable.create(tmp_path / "usage", 2, WORKERS)
    command = [sys.executable, "-c", TAKES_MANY]
    running = [
        subprocess.Popen([*command, str(at), str(tmp_path / "usage")], stdout=subprocess.PIPE) for at in range(WORKERS)
    ]
    said = [child.communicate(timeout=PATIENCE_S)[0] for child in running]
    assert sum(map(int, said)) == 300
