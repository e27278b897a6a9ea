"""One interface: what is true of the blocking calls is true of their awaitable twins and of what a server accepts."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest

from headrace import DataPool, Step
from headrace.data.errors import InvalidInput
from headrace.pool import operations
from headrace.pool.batch import Batch
from headrace.pool.calls import AsyncPool, BlockingPool
from headrace.pool.operation import Change, Operation, Read, Upkeep


def public(cls: type) -> dict[str, Any]:
    return {
        name: member for name, member in vars(cls).items() if inspect.isfunction(member) and not name.startswith("_")
    }


def kinds(base: type[Operation[Any]]) -> set[type[Operation[Any]]]:
    """The operations that derive from a class, themselves and through others."""
    found = {kind for below in base.__subclasses__() for kind in kinds(below)}
    return found | ({base} if "name" in vars(base) else set())


def test_every_call_has_an_awaitable_twin_with_the_same_arguments_answer_and_documentation() -> None:
    blocking, awaited = public(BlockingPool), public(AsyncPool)
    assert blocking.pop("execute")
    assert blocking.keys() == awaited.keys()
    for name in blocking:
        assert inspect.signature(blocking[name]) == inspect.signature(awaited[name])
        assert blocking[name].__doc__ == awaited[name].__doc__ != None  # noqa: E711


def test_a_call_shows_its_real_name_and_signature() -> None:
    assert BlockingPool.open.__qualname__ == "BlockingPool.open"
    assert str(inspect.signature(DataPool().open)) == (
        "(trajectory_uid: str, prompt_uid: str | None = None, channel: str = 'train', "
        "metadata: dict[str, typing.Any] | None = None, n_rollouts: int | None = None, *, "
        "move: bool = False, keep: bool = False) -> None"
    )
    assert inspect.signature(BlockingPool.fetch_batch).return_annotation == Batch | None
    assert str(inspect.signature(DataPool().configure)).startswith("(channel: str = 'train', **options: Any) -> ")


def test_every_operation_can_be_asked_for_by_another_process() -> None:
    """All but those that are sent under another's name, with its arguments."""
    for kind in kinds(Operation):
        asked = operations.OPERATIONS[kind.name]
        assert asked is kind or get_type_hints(asked) == get_type_hints(kind)
        assert issubclass(kind, Change | Read | Upkeep)


@pytest.mark.parametrize("what", ["list_trajectories", "list_steps"])
def test_pages_skip_nobody_when_groups_leave_between_them(what: str) -> None:
    fields: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2], "step_index": 0, "is_last": True}
    with DataPool() as pool:
        pool.submit_steps([Step(trajectory_uid=f"t{i}", **fields) for i in range(10)])
        first = getattr(pool, what)(limit=4)
        assert pool.fetch_batch(2, timeout=0) is not None
        rest = getattr(pool, what)(limit=100, cursor=first["next"])
    assert [row["trajectory_uid"] for row in first["items"] + rest["items"]] == [f"t{i}" for i in range(10)]


def test_the_states_of_trajectories_are_told_also_of_those_that_are_gone() -> None:
    fields: dict[str, Any] = {"prompt_ids": [1], "response_ids": [2], "step_index": 0, "is_last": True}
    with DataPool() as pool:
        for uid in ("used", "out", "old", "broken"):
            pool.submit_steps([Step(trajectory_uid=uid, **(fields | {"is_last": uid != "broken"}))])
        assert pool.fetch_batch(1, timeout=0) is not None
        assert pool.fetch_batch(1, timeout=0, lease_s=600) is not None
        pool.fail("broken", "it broke")
        pool.submit_steps([Step(trajectory_uid="new", reward=0.5, policy_version=9, **fields)])
        pool.set_version(9)
        pool.configure(max_staleness=1)
        uids = ["new", "used", "out", "old", "broken", "nobody"]
        found = pool.trajectory_states(uids)
        assert [row["trajectory_uid"] for row in found] == uids
        assert [row["state"] for row in found] == ["queued", "consumed", "leased", "stale", "failed", "unknown"]
        assert (found[0]["complete"], found[0]["steps"], found[0]["reward"]) == (True, 1, 0.5)
        assert pool.trajectory_states(["new"], "val") == [{"trajectory_uid": "new", "state": "unknown"}]
        with pytest.raises(InvalidInput, match="10001 uids; at most 10000"):
            pool.trajectory_states(["t"] * 10_001)
