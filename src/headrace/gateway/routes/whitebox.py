"""The routes of flows that handle tokens themselves: sampling by ids, handing their own steps in, and scoring."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from headrace.data.errors import InvalidInput, shown
from headrace.data.step import Step, token_ids_array
from headrace.gateway.access import Caller, Role, tells_reward
from headrace.gateway.executor import CallExecutor
from headrace.gateway.gateway import Gateway
from headrace.gateway.http import ClientGone, DisconnectWatch, decode_body, json_response
from headrace.gateway.redaction import REDACTED, redacted_step
from headrace.gateway.request import BadField, CallRequest, take_max_tokens, take_sampling, tools_bytes
from headrace.gateway.routes.bodies import ComputeRewardBody, GenerateBody, StepBody, SubmitStepsBody
from headrace.gateway.turn import Turn
from headrace.gateway.upstream import RolloutServerFailed
from headrace.pool.errors import NotFound
from headrace.rewards.sample import Sample
from headrace.tokens import Cause, Conversation, PromptPlan, read_messages, text_of

#: What counters call prompts that belong to no channel.
NO_CHANNEL = "-"


class WhiteBoxRoutes:
    """The handlers, bound to one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    async def generate(self, request: Request) -> Response:
        """Samples an answer to ids or messages; records nothing."""
        gateway = self.gateway
        caller = gateway.access.caller(request, Role.AGENT)
        with caller.admitted(), gateway.admission.call() as held:
            asked = decode_body(await gateway.body(request, caller, held=held), GenerateBody)
            try:
                async with DisconnectWatch(request.receive):
                    calls, turn = await self._sampled(asked)
            except ClientGone:
                return Response(status_code=499)
        (choice,) = turn.choices
        assert choice.sampled is not None
        caller.used(len(turn.plan.ids), len(choice.ids))
        return json_response(
            {
                "prompt_ids": turn.plan.ids.tolist(),
                "response_ids": choice.ids,
                "token_ids": choice.ids,
                "log_probs": choice.log_probs,
                "response_text": text_of(calls.planner.renderer.vocabulary, choice.ids, prompt=turn.plan.ids),
                "stop_reason": choice.sampled.finish_reason,
                "policy_version": turn.version,
                "version_spans": [list(span) for span in choice.sampled.spans],
                "sampling": turn.upstream_request.sampling,
                "logprobs_mode": calls.log_prob_mode,
            }
        )

    async def _sampled(self, asked: GenerateBody) -> tuple[CallExecutor, Turn]:
        model = self.gateway.models.get(asked.model)
        calls = model.calls
        planner = calls.planner
        request = _call_request(asked)
        if request.conversation is not None:
            plan = await planner.conversation(request.conversation, tools_size=tools_bytes(request.conversation))
        else:
            plan = PromptPlan(planner.checked(token_ids_array(asked.prompt_ids, "prompt_ids")), Cause.FIRST)
        call_id = uuid.uuid4().hex
        context = model.upstream.max_model_len
        turn = planner.turn(NO_CHANNEL, request, plan, call_id, "", context, sticky=asked.trajectory_uid or call_id)
        await calls.sample([turn])
        (choice,) = turn.choices
        trouble = calls.trouble(turn, choice, choice.response(), choice.values())
        if trouble is not None:
            self.gateway.counters.add("quarantined", NO_CHANNEL, trouble.value)
            raise RolloutServerFailed(
                f"{turn.server} gave an answer that must not be trained on: {trouble.value}", "malformed"
            )
        return calls, turn

    async def submit_steps(self, request: Request) -> Response:
        """Takes steps that a flow made itself: all of them, or none."""
        gateway = self.gateway
        caller = gateway.access.caller(request, Role.AGENT)
        channel = caller.channel(request.query_params.get("channel") or None, gateway.models.default.channel)
        with caller.admitted():
            asked = decode_body(await gateway.body(request, caller), SubmitStepsBody)
            if any(step.reward is not None or step.is_last or tells_reward(step.metadata) for step in asked.steps):
                gateway.access.caller(request, Role.REWARD)  # an agent must not pay or end itself this way either
            steps = [_step(at, _scoped(given, caller)) for at, given in enumerate(asked.steps)]
            return await self._submitted(steps, channel)

    async def _submitted(self, steps: list[Step], channel: str) -> Response:
        gateway = self.gateway
        for step in steps:
            gateway.models.check(step.trajectory_uid)
        kept = steps
        if gateway.redaction is not None:
            kept = [step if await gateway.redaction.keeps(step, channel) else redacted_step(step) for step in steps]
        await gateway.recorder.flushed(*{step.trajectory_uid for step in kept})
        receipt = await gateway.pool.aio.submit_steps(kept, channel, timeout=0)
        for uid in {step.trajectory_uid for step in kept if step.is_last}:
            await gateway.forget(uid)  # it takes no more calls
        dropped = sum(step.quarantined == REDACTED for step in kept)
        said: dict[str, Any] = {"accepted": receipt.accepted}
        if dropped:
            said["redacted"] = dropped
        if receipt.duplicates:
            said["duplicates"] = receipt.duplicates
        if receipt.late:
            said["late"] = receipt.late
        return json_response(said)

    async def compute_reward(self, request: Request) -> Response:
        """What an answer is worth, of ids or of a conversation; nothing is recorded."""
        gateway = self.gateway
        gateway.access.check(request, Role.REWARD)
        asked = decode_body(await gateway.body(request), ComputeRewardBody)
        sample = await self._sample(asked)
        try:
            with gateway.admission.call():
                async with DisconnectWatch(request.receive):
                    found = await gateway.scoring.score(sample)
        except ClientGone:
            return Response(status_code=499)
        return json_response(
            {"reward_score": found.value, "reward": found.value, "reward_extra_info": found.extra_info}
        )

    async def _sample(self, asked: ComputeRewardBody) -> Sample:
        """What is to be scored: the row's fields go before those that a flow added."""
        scoring = self.gateway.scoring
        _ = scoring.worker  # refused before a tokenizer is waited for
        row = {**(asked.extra_fields or {}), **(asked.dataset_fields or {})}
        if asked.messages is not None and asked.prompt_ids is None and asked.response_ids is None:
            if asked.trajectory_uid is not None:
                row = {**await self._registered(asked.trajectory_uid), **row}
            return scoring.of_messages(asked.messages, row, trajectory_uid=asked.trajectory_uid)
        if asked.messages is not None or asked.prompt_ids is None or asked.response_ids is None:
            raise BadField("give either prompt_ids and response_ids, or messages with a trajectory_uid", "prompt_ids")
        prompt = token_ids_array(asked.prompt_ids, "prompt_ids").tolist()
        response = token_ids_array(asked.response_ids, "response_ids").tolist()
        renderer = self.gateway.models.default.renderer
        return scoring.of_ids(renderer, prompt, response, row, asked.num_turns)

    async def _registered(self, uid: str) -> dict[str, Any]:
        """The metadata that a trajectory was begun with; empty where the pool does not know it."""
        self.gateway.models.check(uid)
        try:
            return (await self.gateway.pool.aio.trajectory(uid)).metadata
        except NotFound:
            return {}


def _call_request(asked: GenerateBody) -> CallRequest:
    """What `/generate` takes, as a call's request."""
    if (asked.prompt_ids is None) == (asked.messages is None):
        raise BadField("give either prompt_ids or messages", "prompt_ids")
    fields = dict(asked.sampling_params or {})
    beside = {"max_tokens": asked.max_tokens, "temperature": asked.temperature, "top_p": asked.top_p}
    fields |= {name: value for name, value in beside.items() if value is not None}
    if fields.pop("n", 1) != 1:
        raise BadField("n is not offered here: one call samples one answer", "sampling_params")
    for name in ("logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens", "output_kind"):
        fields.pop(name, None)  # how vLLM's own SamplingParams show an answer; ids and log-probs always come
    most = take_max_tokens(fields, "max_tokens", "max_new_tokens")
    sampling = take_sampling(fields)
    if most is not None:
        sampling["max_tokens"] = most
    for at, tool in enumerate(asked.tools or ()):
        if not isinstance(tool, dict):
            raise BadField(f"tools[{at}] must be an object, not {shown(tool)}", "tools")
    conversation = None
    if asked.messages is not None:
        conversation = Conversation(read_messages(asked.messages), asked.tools, asked.chat_template_kwargs)
    return CallRequest(model="", conversation=conversation, sampling=sampling, extra=fields)


def _scoped(given: StepBody, caller: Caller) -> StepBody:
    """A step under the names that the pool has for its caller's trajectories."""
    prompt = caller.uid(given.prompt_uid) if given.prompt_uid is not None else None
    return msgspec.structs.replace(given, trajectory_uid=caller.uid(given.trajectory_uid), prompt_uid=prompt)


def _step(at: int, given: StepBody) -> Step:
    fields: dict[str, Any] = {
        name: value for name in StepBody.__struct_fields__ if (value := getattr(given, name)) is not None
    }
    try:
        for name in ("prompt_ids", "response_ids"):
            fields[name] = np.asarray(fields[name], np.int64)  # their values are checked all at once
        return Step(**fields)
    except (InvalidInput, OverflowError) as error:
        raise InvalidInput(f"steps[{at}]: {error}") from None
