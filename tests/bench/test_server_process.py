"""What is counted of a server's processes."""

from __future__ import annotations

from tests.bench.busy_grandchild import BUSY_S

from headrace.bench.server_process import ServerProcess


def test_the_cpu_of_children_is_that_of_all_processes_below() -> None:
    with ServerProcess("tests.bench.busy_grandchild") as server:
        assert server.address
        own_s = server.cpu_s()
        assert server.cpu_s(children=True) >= own_s + BUSY_S
