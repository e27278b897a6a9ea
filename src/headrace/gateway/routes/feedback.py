"""`/v1/feedback`: what people thought of an answer, told later by its response id alone, whatever happened since."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.data.step import check_finite
from headrace.data.trajectory import Trajectory
from headrace.gateway.access import Caller, Role
from headrace.gateway.errors import Refusal
from headrace.gateway.gateway import Gateway
from headrace.gateway.http import Handler, decode_body, json_response
from headrace.gateway.live.conversations import LiveConversations
from headrace.gateway.live.index import call_in, conversation_of
from headrace.gateway.routes.bodies import FeedbackBody
from headrace.gateway.routes.calls import opened
from headrace.pool.errors import Conflict, Gone, NotFound
from headrace.pool.groups import PERSON

#: Characters of a comment: it is kept in its step's metadata.
MAX_COMMENT_CHARACTERS = 10_000


def feedback_handler(gateway: Gateway, live: LiveConversations | None) -> Handler:
    """The handler of `/v1/feedback`."""

    async def feedback(request: Request) -> Response:
        """What an answer was worth, by its response id; `late` once a trainer has it."""
        opened(live)
        caller = gateway.access.caller(request, Role.REWARD)
        with caller.admitted():
            asked = decode_body(await gateway.body(request, caller), FeedbackBody)
            check_finite(asked.reward, "reward")
            told = await give_feedback(gateway, caller, asked)
        gateway.counters.add("feedback", told["status"])
        return json_response(told)

    return feedback


async def give_feedback(gateway: Gateway, caller: Caller, asked: FeedbackBody) -> dict[str, Any]:
    """Rewards the steps of an answer. `late`: a trainer has them, or had them, already."""
    call = call_in(asked.response_id)
    if call is None:
        raise Refusal(
            f"response_id is {asked.response_id[:100]!r}; it is the id of an answer that was given under /v1, such as "
            "chatcmpl-... with 40 digits behind it. What was answered under a base_url is paid with its /v1/reward",
            400,
            code="invalid_response_id",
        )
    if asked.comment is not None and len(asked.comment) > MAX_COMMENT_CHARACTERS:
        raise Refusal(f"comment has {len(asked.comment)} characters; at most {MAX_COMMENT_CHARACTERS} are taken", 400)
    root = caller.uid(conversation_of(call))
    await gateway.flushed(root)
    gone: str | None = None
    for model in gateway.models:
        held = model.uid_of(root)
        try:
            found = await gateway.pool.aio.trajectory(held)
        except Gone:
            gone = gone or held
            continue
        except NotFound:
            continue
        indices = _steps_of(found, call)
        if indices:
            return _told(conversation_of(call), [await _paid(gateway, held, index, asked) for index in indices])
    if gone is not None:
        return _told(conversation_of(call), [await gateway.pool.aio.reward(gone, asked.reward)])
    raise Refusal(
        f"no answer {asked.response_id!r} is kept here: it made no step, or its conversation is not known any more",
        404,
        code="unknown_response",
    )


def _steps_of(trajectory: Trajectory, call: str) -> list[int]:
    """The steps of an answer; several where it has several choices."""
    calls = {index: record.head.peek().call_id or "" for index, record in trajectory.tree.records.items()}
    return sorted(index for index, known in calls.items() if known == call or known.startswith(f"{call}-"))


async def _paid(gateway: Gateway, held: str, index: int, asked: FeedbackBody) -> str:
    pool = gateway.pool.aio
    status = await pool.reward(held, asked.reward, index, source=PERSON)
    if status == "ok" and asked.comment is not None:
        try:
            await pool.curate(held, index, note=asked.comment)
        except (Conflict, NotFound):
            return "late"  # it was handed out in between: with its reward, without the comment
    return status


def _told(uid: str, statuses: list[str]) -> dict[str, Any]:
    status = "late" if "late" in statuses else statuses[0]
    return {"status": status, "trajectory_uid": uid, "steps": len(statuses)}
