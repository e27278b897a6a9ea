"""One interface: what is true of the blocking calls is true of their awaitable twins and of what a server accepts."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from headrace import DataPool, Step
from headrace.pool import operations
from headrace.pool.aio import AsyncPool
from headrace.pool.arguments import BY_OPERATION
from headrace.pool.calls import Calls
from headrace.pool.desk.aio import AsyncDesk
from headrace.pool.desk.calls import DeskCalls
from headrace.pool.embedded import UPKEEP


def public(cls: type) -> dict[str, inspect.Signature]:
    return {
        name: inspect.signature(member)
        for name, member in vars(cls).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


def test_every_call_has_an_awaitable_twin_with_the_same_arguments_and_answer() -> None:
    assert public(Calls) == public(AsyncPool)
    assert public(DeskCalls) == public(AsyncDesk)


def test_every_operation_has_its_arguments_typed() -> None:
    assert set(BY_OPERATION) == {*operations.PLANS, *operations.READS, *UPKEEP}


@pytest.mark.parametrize("what", ["list_trajectories", "list_steps"])
def test_pages_skip_nobody_when_groups_leave_between_them(what: str) -> None:
    fields: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2], "step_index": 0, "is_last": True}
    with DataPool() as pool:
        pool.submit_steps([Step(trajectory_uid=f"t{i}", **fields) for i in range(10)])
        first = getattr(pool, what)(limit=4)
        assert pool.fetch_batch(2, timeout=0) is not None
        rest = getattr(pool, what)(limit=100, cursor=first["next"])
    assert [row["trajectory_uid"] for row in first["items"] + rest["items"]] == [f"t{i}" for i in range(10)]
