"""Answers given again: a client that lost one and asks once more gets the same, and no second step is made.

The SDKs mark their retries. Whether the first answer is still being sampled, was sampled here, or by a process
that is gone, the retry gets that one; what was recorded is enough to write it again.
"""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request as HttpRequest

from headrace.data.step import Step
from headrace.gateway.ask import Ask
from headrace.gateway.planner import Planner
from headrace.gateway.session import Session
from headrace.gateway.sessions import Sessions
from headrace.gateway.turn import Turn
from headrace.gateway.upstream.types import Order, Sampled
from headrace.tokens import Cause, PromptPlan

RETRY_HEADER = "x-stainless-retry-count"


def is_retry(request: HttpRequest) -> bool:
    count = request.headers.get(RETRY_HEADER, "0")
    return count.isdecimal() and count.strip("0") != ""


async def earlier(planner: Planner, sessions: Sessions, session: Session, ask: Ask, digest: str) -> list[Turn] | None:
    """The turns of the first try, where it was answered or will be; None where it failed."""
    running = session.running.get(digest)
    if running is not None:
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not running.cancelled():
                raise
            return None  # it failed, and its own caller was told; this one tries anew
    steps = await sessions.answered(session, digest)
    return _rebuilt(planner, ask, steps) if steps else None


def _rebuilt(planner: Planner, ask: Ask, steps: list[Step]) -> list[Turn] | None:
    """Turns out of recorded steps: one a prompt, its choices in their order."""
    by_place = {int(step.metadata.get("choice", 0)): step for step in steps}
    prompts = max(1, len(ask.prompts))
    if set(by_place) != set(range(prompts * ask.n)):
        return None
    turns: list[Turn] = []
    for at in range(prompts):
        own = [by_place[at * ask.n + index] for index in range(ask.n)]
        plan = PromptPlan(own[0].prompt_ids, Cause.REPEATED)
        call_id = (own[0].call_id or "").removesuffix("-0") if ask.n > 1 else own[0].call_id or ""
        choices = planner.choices(ask, plan, call_id)
        for choice, step in zip(choices, own, strict=True):
            choice.take(_sampled(planner, choice.index, step))
            choice.finish()
        turns.append(
            Turn(
                call_id=call_id,
                ask=ask,
                plan=plan,
                order=Order(plan.ids, own[0].sampling or {}),
                choices=choices,
                first=at * ask.n,
                created=int(own[0].created_at or time.time()),
                began=time.monotonic(),
            )
        )
    return turns


def _sampled(planner: Planner, index: int, step: Step) -> Sampled:
    ids = step.response_ids.tolist()
    values = step.rollout_log_probs.tolist() if step.rollout_log_probs is not None else None
    vocabulary = planner.renderer.vocabulary
    return Sampled(
        index,
        ids,
        values,
        None,
        step.finish_reason,
        step.metadata.get("stop_reason"),
        spans=step.version_spans or ((0, step.policy_version or 0),),
        tokens=[vocabulary.decode([token]) for token in ids],
    )
