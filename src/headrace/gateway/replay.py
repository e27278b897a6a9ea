"""Answers given again: a client that lost one and asks once more gets the same, and no second step is made.

Whether the first answer is still being sampled, was sampled here, or by a process that is gone, its retry gets that
one; what was recorded is enough to write it again, but for the alternatives of its tokens. `retries` says which of
several equal calls a retry repeats.
"""

from __future__ import annotations

import time

from msgspec.structs import replace

from headrace.data.step import Step
from headrace.gateway.planner import Planner
from headrace.gateway.request import CallRequest
from headrace.gateway.retries import ExpectedRetry, RetryMark
from headrace.gateway.sessions import REQUEST_FIELD, Session, Sessions
from headrace.gateway.turn import Choice, Turn
from headrace.gateway.upstream.types import SampledChoice, UpstreamRequest
from headrace.tokens import Cause, PromptPlan


async def earlier_answer(
    planner: Planner, sessions: Sessions, session: Session, request: CallRequest, mark: RetryMark, digest: str
) -> list[Turn] | None:
    """The turns of the call that this one repeats, where it was answered or will be; None where it is a new one."""
    retries = session.retries
    while True:
        retry = retries.expected.take(digest, mark.count) if mark.key is None else None
        if retry is not None:
            return await _lost_answer(planner, sessions, session, request, mark, digest, retry)
        if mark.key is None and retries.count(digest) > 1:
            return None
        running = retries.running(digest)
        if running:
            found = await running[0].outcome()
            if found is not None:
                return found
            continue  # it failed, and one of those that waited for it is the try after it
        steps = await sessions.recorded(session)
        if retries.running(digest):
            continue  # it began meanwhile
        made = _only(request, steps, digest, named=mark.key is not None)
        return _rebuilt(planner, request, made) if made else None


async def _lost_answer(
    planner: Planner,
    sessions: Sessions,
    session: Session,
    request: CallRequest,
    mark: RetryMark,
    digest: str,
    retry: ExpectedRetry,
) -> list[Turn] | None:
    """The turns of the answer that an expected try is to get; None where there was none."""
    if retry.answer is None:
        return None
    try:
        made = _by_call(request, _answers(await sessions.recorded(session), digest)).get(retry.answer)
    except BaseException:
        session.retries.expected.add(digest, mark.count, retry.answer)  # for the try after this one
        raise
    return _rebuilt(planner, request, made) if made else None


def whole_piece(choice: Choice) -> SampledChoice:
    """All of a choice's answer as one piece."""
    assert choice.sampled is not None
    fields = {"ids": choice.ids, "log_probs": choice.log_probs, "text": choice.text}
    return replace(choice.sampled, **fields, tokens=choice.tokens, top=choice.top)


def _by_call(request: CallRequest, steps: list[Step]) -> dict[str, list[Step]]:
    """Steps by the call that made them."""
    found: dict[str, list[Step]] = {}
    for step in steps:
        at, index = divmod(_choice_of(step), request.n)
        ending = (f"-{at}" if len(request.prompts) > 1 else "") + (f"-{index}" if request.n > 1 else "")
        found.setdefault((step.call_id or "").removesuffix(ending), []).append(step)
    return found


def _choice_of(step: Step) -> int:
    """Which choice of its call a step is; below 0 where its metadata say no such thing, as a flow's own may."""
    found = step.metadata.get("choice", 0)
    return found if type(found) is int else -1


def _answers(steps: list[Step], digest: str) -> list[Step]:
    return [step for step in steps if step.metadata.get(REQUEST_FIELD) == digest]


def _only(request: CallRequest, steps: list[Step], digest: str, *, named: bool) -> list[Step] | None:
    """The steps of the call with that digest. Where it has no name of its own, others may ask the same: then it must be
    the only one."""
    calls = list(_by_call(request, _answers(steps, digest)).values())
    return calls[0] if len(calls) == 1 or (calls and named) else None


def _rebuilt(planner: Planner, request: CallRequest, steps: list[Step]) -> list[Turn] | None:
    """Turns out of recorded steps: one a prompt, its choices in their order."""
    by_choice = {_choice_of(step): step for step in steps}
    prompts = max(1, len(request.prompts))
    if set(by_choice) != set(range(prompts * request.n)):
        return None
    turns: list[Turn] = []
    for at in range(prompts):
        own = [by_choice[at * request.n + index] for index in range(request.n)]
        plan = PromptPlan(own[0].prompt_ids, Cause.REPEATED)
        call_id = (own[0].call_id or "").removesuffix("-0") if request.n > 1 else own[0].call_id or ""
        upstream_request = UpstreamRequest(plan.ids, own[0].sampling or {})
        choices = planner.choices(request, plan, call_id, upstream_request)
        for choice, step in zip(choices, own, strict=True):
            choice.take(_sampled(planner, choice.index, step))
            choice.finish()
        turns.append(
            Turn(
                call_id=call_id,
                request=request,
                plan=plan,
                upstream_request=upstream_request,
                choices=choices,
                first=at * request.n,
                created=int(own[0].created_at or time.time()),
                began=time.monotonic(),
            )
        )
    return turns


def _sampled(planner: Planner, index: int, step: Step) -> SampledChoice:
    ids = step.response_ids.tolist()
    values = step.rollout_log_probs.tolist() if step.rollout_log_probs is not None else None
    vocabulary = planner.renderer.vocabulary
    return SampledChoice(
        index,
        ids,
        values,
        None,
        step.finish_reason,
        step.metadata.get("stop_reason"),
        spans=step.version_spans or ((0, step.policy_version or 0),),
        tokens=[vocabulary.token_text(token) for token in ids],
    )
