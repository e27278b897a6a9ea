"""Carrying calls out: sample, read, check, record. What an agent sees answered has been handed over before.

A call that the rollout server failed, or whose agent hung up, leaves nothing behind. One whose step fails the check is
answered all the same, and its step is quarantined: nothing trains on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import asdict, replace

from headrace.data.block import MAX_METADATA_BYTES
from headrace.data.step import FloatArray, IntArray, Step
from headrace.gateway.counters import GatewayCounters
from headrace.gateway.planner import Planner
from headrace.gateway.recorder import Recorder
from headrace.gateway.redaction import Redaction
from headrace.gateway.sessions import REQUEST_FIELD, STORED_FIELD, TEXT_FIELD, Session, Sessions, TextNode
from headrace.gateway.turn import Choice, TextKey, Turn
from headrace.gateway.upstream import RolloutServerFailed, Upstream
from headrace.gateway.upstream.streamed import HandOn, hand_on
from headrace.gateway.upstream.types import SampledChoice
from headrace.gateway.upstream.upstream import gather_or_cancel
from headrace.tokens import RECORD, RECORD_ONLY, AnswerDelta, Node, NodeRecord, Quarantine, check_step, text_of
from headrace.tokens.images import to_step

#: What is wrong with log-probs that cannot even be kept.
UNUSABLE_LOG_PROBS = (Quarantine.LOG_PROB_COUNT, Quarantine.LOG_PROB_VALUE)

#: Bytes that a stored response may take in its step's metadata, with the call's fields: the rest is for what the
#: gateway itself says there.
MAX_STORED_BYTES = MAX_METADATA_BYTES - 100_000

#: What is new of an answer; the piece that was sampled comes with the first that it brought.
StreamedPiece = tuple[Turn, Choice, AnswerDelta, SampledChoice | None]
#: Takes what is new of an answer; how it is sent to the agent, None where nothing is to be.
Show = Callable[[list[StreamedPiece]], HandOn | None]


class CallExecutor:
    """Samples, checks and records the planned turns of one model's calls."""

    def __init__(
        self,
        planner: Planner,
        upstream: Upstream,
        sessions: Sessions,
        recorder: Recorder,
        counters: GatewayCounters,
        redaction: Redaction | None,
        *,
        trained: bool = True,
    ) -> None:
        """`trained`: its steps may be trained on."""
        self.planner = planner
        self._upstream = upstream
        self._sessions = sessions
        self._recorder = recorder
        self._counters = counters
        self._redaction = redaction
        self._trained = trained

    async def sample(self, turns: list[Turn]) -> None:
        """Samples whole answers to all the turns, into their choices; raises like `Upstream.sample`."""
        if len(turns) == 1:
            await self._whole(turns[0])
        else:
            await gather_or_cancel([self._whole(turn) for turn in turns])

    async def _whole(self, turn: Turn) -> None:
        answer = await self._upstream.sample(turn.upstream_request)
        turn.server = answer.server
        turn.first_token = time.monotonic()
        for sampled in answer.choices:
            choice = self._choice(turn, sampled)
            choice.take(sampled)
            choice.finish()
        _check_whole(turn)

    async def stream(self, turns: list[Turn], show: Show, flush_s: float) -> None:
        """Samples turn by turn, and has `show` told what is new as it comes, gathered for `flush_s` after the first;
        text that was held back has no piece. Raises like `Upstream.stream`."""
        for turn in turns:
            take = partial(self._take, turn, show, joined=flush_s > 0)
            await self._upstream.stream(turn.upstream_request, take, flush_s)
            _check_whole(turn)
            await hand_on(show([(turn, choice, choice.finish(), None) for choice in turn.choices]))

    def _take(self, turn: Turn, show: Show, sampled: SampledChoice, *, joined: bool) -> HandOn | None:
        if turn.first_token is None:
            turn.first_token, turn.server = time.monotonic(), sampled.server
        choice = self._choice(turn, sampled)
        if not joined:
            return show([(turn, choice, choice.take(sampled), sampled)])
        parts = choice.take_parts(sampled)
        if len(parts) == 1:
            return show([(turn, choice, parts[0], sampled)])
        return show([(turn, choice, delta, None if at else sampled) for at, delta in enumerate(parts)])

    def _choice(self, turn: Turn, sampled: SampledChoice) -> Choice:
        if not 0 <= sampled.index < len(turn.choices):
            raise RolloutServerFailed(
                f"the rollout server answered a choice {sampled.index} of {len(turn.choices)}", "malformed"
            )
        return turn.choices[sampled.index]

    async def record(self, session: Session, turns: list[Turn], *, named: bool = False) -> None:
        """Checks the answers, makes a step of each, and hands the steps over; raises like `Recorder.hand_over`."""
        steps: list[Step] = []
        nodes: list[Node | None] = []
        for turn in turns:
            for choice in turn.choices:
                step, node = self._step(session, turn, choice, first=not steps)
                if self._redaction is not None:
                    whole = step if step.builds_on is None else replace(step, prompt_ids=turn.plan.ids, builds_on=None)
                    if not await self._redaction.keeps(whole, session.channel):
                        session.stored.not_in_pool(turn.call_id)
                        continue
                steps.append(step)
                nodes.append(node)
        if steps:
            await self._recorder.hand_over(session, steps, nodes, named=named)

    def _step(self, session: Session, turn: Turn, choice: Choice, *, first: bool) -> tuple[Step, Node | None]:
        request, plan, sampled = turn.request, turn.plan, choice.sampled
        assert sampled is not None
        response, log_probs = choice.response(), choice.values()
        renderer = self.planner.renderer
        trouble = self.trouble(turn, choice, response, log_probs)
        record = self._record(session, turn, choice)
        metadata: dict[str, Any] = {**self._about(turn, choice), RECORD: record.to_metadata()}
        if turn.text is not None:
            key = TextKey.of(turn.text + text_of(renderer.vocabulary, choice.ids, prompt=plan.ids))
            turn.text_keys.append(key)
            metadata[TEXT_FIELD] = asdict(key)
        parent = plan.parent
        if request.store:
            stored = session.stored.share(request, choice.message(), parent)
            session.stored.add(turn.call_id, stored)
            self._sessions.grown(session, stored.tokens)
            text = stored.to_metadata()
            if len(text.encode()) + turn.call_bytes <= MAX_STORED_BYTES:
                metadata[STORED_FIELD] = text
            else:
                session.stored.not_in_pool(turn.call_id)
        builds_on = (parent.step, plan.kept) if first and parent is not None and isinstance(parent.step, int) else None
        versions = [version for _, version in sampled.spans]
        step = Step(
            prompt_ids=plan.ids[plan.kept :] if builds_on else plan.ids,
            response_ids=response,
            rollout_log_probs=None if trouble in UNUSABLE_LOG_PROBS else log_probs,
            trajectory_uid=session.uid,
            prompt_uid=session.prompt_uid,
            policy_version=min(versions, default=None),
            version_spans=sampled.spans if len(sampled.spans) > 1 else None,
            metadata=metadata,
            finish_reason=sampled.finish_reason,
            sampling={**turn.upstream_request.sampling, **({"extra": request.extra} if request.extra else {})},
            multi_modal_data=to_step(plan.images) if plan.images else None,
            routed_experts=sampled.routed_experts,
            call_id=turn.call_id if len(turn.choices) == 1 else f"{turn.call_id}-{choice.index}",
            builds_on=builds_on,
            quarantined=trouble or (None if self._trained else RECORD_ONLY),
        )
        self._count(session.channel, turn, choice)
        if trouble is not None:
            self._counters.add("quarantined", session.channel, trouble.value)
            return step, None
        node = session.history.add(record, plan.ids, response, parent, call=turn.call_id)
        if TEXT_FIELD in metadata:
            session.texts.append(TextNode(metadata[TEXT_FIELD]["length"], metadata[TEXT_FIELD]["digest"], node))
        self._sessions.grown(session, len(node.own))
        return step, node

    @property
    def log_prob_mode(self) -> str | None:
        """Which log-probs the servers give: of what was sampled from (`processed`) or of temperature 1 (`raw`)."""
        return self._upstream.log_prob_mode

    def trouble(
        self, turn: Turn, choice: Choice, response: IntArray, log_probs: FloatArray | None
    ) -> Quarantine | None:
        """Why an answer must not be trained on; None where all is well."""
        renderer = self.planner.renderer
        return check_step(
            renderer.vocabulary,
            prompt=turn.plan.ids,
            response=response,
            log_probs=log_probs,
            parent=turn.plan.parent,
            parent_ids=turn.plan.parent_ids,
            consumed=choice.consumed,
            text=choice.text,
            continued=choice.continued,
            stop=turn.upstream_request.stop,
            min_tokens=turn.upstream_request.min_tokens,
            stop_ids=renderer.stop_ids.union(turn.upstream_request.sampling.get("stop_token_ids", ())),
        )

    def _record(self, session: Session, turn: Turn, choice: Choice) -> NodeRecord:
        if turn.request.conversation is None:
            return NodeRecord.opaque(f"{turn.call_id}-{choice.index}", turn.plan.parent)
        message = choice.message()
        return session.history.record(turn.request.conversation, message, turn.plan.parent)

    def _about(self, turn: Turn, choice: Choice) -> dict[str, object]:
        """What a step keeps beside its tokens."""
        now = time.monotonic()
        waited = (turn.first_token or now) - turn.began
        about: dict[str, object] = {
            "model": turn.request.model,
            "server": turn.server,
            "cause": turn.plan.cause.value,
            "timings": {"first_token_s": round(waited, 6), "total_s": round(now - turn.began, 6)},
            REQUEST_FIELD: turn.request_digest,
        }
        if turn.request.user is not None:
            about["user"] = turn.request.user
        if choice.sampled is not None and choice.sampled.stop_reason is not None:
            about["stop_reason"] = choice.sampled.stop_reason
        if turn.first or choice.index:
            about["choice"] = turn.first + choice.index
        if self.log_prob_mode is not None:
            about["log_probs"] = self.log_prob_mode
        return about

    def _count(self, channel: str, turn: Turn, choice: Choice) -> None:
        if choice.index == 0:
            self._counters.add("tokens", channel, "prompt", by=len(turn.plan.ids))
        self._counters.add("tokens", channel, "sampled", by=len(choice.ids))
        malformed = choice.parsed.malformed
        if malformed:
            self._counters.add("malformed_calls", channel, by=len(malformed))


def _check_whole(turn: Turn) -> None:
    """An answer without tokens, or without all its choices, is no answer."""
    for choice in turn.choices:
        if choice.sampled is None or not choice.ids:
            raise RolloutServerFailed(f"the rollout server sampled nothing for choice {choice.index}", "malformed")
