"""What people thought of an answer, told later: by its response id alone, whatever happened to it since."""

from __future__ import annotations

from typing import Any

from headrace.data.trajectory import Trajectory
from headrace.gateway.access import Caller
from headrace.gateway.bodies import Feedback
from headrace.gateway.errors import Refusal
from headrace.gateway.gateway import Gateway
from headrace.gateway.live.names import call_in, uid_of
from headrace.pool.errors import Conflict, Gone, NotFound

#: Characters that a comment may have.
MOST_COMMENT = 10_000


async def give(gateway: Gateway, caller: Caller, asked: Feedback) -> dict[str, Any]:
    """Pays the steps of an answer. `late`: a trainer has them, or had them, already."""
    call = call_in(asked.response_id)
    if call is None:
        raise Refusal(
            f"response_id is {asked.response_id[:100]!r}; it is the id of an answer that was given under /v1, such as "
            "chatcmpl-... with 40 digits behind it. What was answered under a base_url is paid with its /v1/reward",
            400,
            code="invalid_response_id",
        )
    if asked.comment is not None and len(asked.comment) > MOST_COMMENT:
        raise Refusal(f"comment has {len(asked.comment)} characters; at most {MOST_COMMENT} are taken", 400)
    root = caller.uid(uid_of(call))
    await gateway.flushed(root)
    gone: str | None = None
    for policy in gateway.models:
        held = policy.uid_of(root)
        try:
            found = await gateway.pool.aio.trajectory(held)
        except Gone:
            gone = gone or held
            continue
        except NotFound:
            continue
        indices = _steps_of(found, call)
        if indices:
            return _told(uid_of(call), [await _paid(gateway, held, index, asked) for index in indices])
    if gone is not None:
        return _told(uid_of(call), [await gateway.pool.aio.reward(gone, asked.reward)])
    raise Refusal(
        f"no answer {asked.response_id!r} is kept here: it made no step, or its conversation is not known any more",
        404,
        code="unknown_response",
    )


def _steps_of(trajectory: Trajectory, call: str) -> list[int]:
    """The steps of an answer; several where it has several choices."""
    calls = {index: record.head.peek().call_id or "" for index, record in trajectory.tree.records.items()}
    return sorted(index for index, known in calls.items() if known == call or known.startswith(f"{call}-"))


async def _paid(gateway: Gateway, held: str, index: int, asked: Feedback) -> str:
    pool = gateway.pool.aio
    status = await pool.reward(held, asked.reward, index)
    if status == "ok" and asked.comment is not None:
        try:
            await pool.curate(held, index, note=asked.comment)
        except (Conflict, NotFound):
            return "late"  # it was handed out in between: with its reward, without the comment
    return status


def _told(uid: str, statuses: list[str]) -> dict[str, Any]:
    status = "late" if "late" in statuses else statuses[0]
    return {"status": status, "trajectory_uid": uid, "steps": len(statuses)}
