"""How the tests of a run are shared out among its worker processes (`pytest -n`).

What one worker is given is a file, whole: fixtures of a module are made once. What needs a Ray cluster is one share of
its own, whatever its file: there is one cluster at a time on the machine, and `address="auto"` finds that one. So is
half of what asks the vLLM that takes a minute to start. Of a few files every test is a share. The shares that take
longest are given out first, so that no worker begins one while the others have nothing left to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

RAY = "ray"
#: A test that needs Ray says so in its id, which is all that the process that shares out knows of it.
NAMES_RAY = re.compile(r"(?<![a-z])ray(?![a-z])")
#: How the ids of tests begin that take long and have no fixture in common.
APART = (
    "tests/bench/test_gateway.py::test_a_part_measures_its_keys",
    "tests/demo/test_run.py",
)
VLLM = "tests/vllm/"
#: How the ids of tests begin that are half of all that is asked of vLLM, or start one of their own, for a model or
#: flags of their own: two workers, each with its vLLM, have as much to do.
OTHER_HALF = tuple(f"{VLLM}test_{name}.py" for name in ("demo", "gateway", "images", "lora", "sync"))
#: Markers of what takes long.
FIRST = ("ray", "slow", "long")


class ByFile(LoadScopeScheduling):
    """Shares in the order in which they are collected: see `longest_first`."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # which would put the shares with the most tests first
        super().__init__(config, log)  # type: ignore[arg-type]

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Takes a worker out that has ended; the test that it ended in, which has failed and is not run again. Only
        what is left of its shares goes to the others: xdist would give away whole ones too, and who is given a share
        of which nothing is left waits for ever."""
        shares = self.assigned_work[node]
        ended_in = next((test for share in shares.values() for test, done in share.items() if not done), None)
        if ended_in is not None:
            shares[share_of(ended_in)][ended_in] = True
        for name in [name for name, share in shares.items() if all(share.values())]:
            del shares[name]
        super().remove_node(node)
        return ended_in

    def _reschedule(self, node: WorkerController) -> None:
        """Gives a worker more, so that it has two tests while there are any: it begins one when it knows the next."""
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)


def share_of(nodeid: str) -> str:
    """The name of the share that a test is of."""
    if NAMES_RAY.search(nodeid):
        return RAY
    if nodeid.startswith(APART):
        return nodeid
    if nodeid.startswith(VLLM) and not nodeid.startswith(OTHER_HALF):
        return VLLM
    return nodeid.partition("::")[0]


def longest_first(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The same tests, those of files with a test that takes long before all others; otherwise in their order, but that
    of the share of vLLM those come last that must wait for the other shares."""
    found = list(items)
    first = {item.path for item in found if any(item.get_closest_marker(name) for name in FIRST)}

    def waits(item: pytest.Item) -> bool:
        return item.get_closest_marker("alone") is not None and share_of(item.nodeid) == VLLM

    return sorted(found, key=lambda item: (waits(item), item.path not in first))


def check_ids(items: Iterable[pytest.Item]) -> None:
    """Raises UsageError for a test that is marked `ray` and does not say so in its id."""
    for item in items:
        if item.get_closest_marker("ray") and not NAMES_RAY.search(item.nodeid):
            raise pytest.UsageError(f"{item.nodeid} is marked ray: name the file, the test or its parameter so")
