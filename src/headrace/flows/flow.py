"""A flow plays one rollout of a task from its beginning to its end, whatever happens on the way.

`AgentFlowBase.run` begins the trajectory, has `play` play it within `timeout_s`, and completes it. A rollout that goes
wrong is told to the gateway as failed, with its reason, and raised as `AgentFailed`: its steps are dropped, and its
group waits for another in its place. What a flow is worth is not its own to say: a reward that `play` returns is one
that the gateway's reward worker computed; without one, the reward loop scores the trajectory later.
"""

from __future__ import annotations

import asyncio
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.flows.gateway_client import ComputedReward, GatewayClient, GatewayRefused, Generation, Handle
from headrace.flows.task import Task
from headrace.net.http_answer import NoAnswer

#: Seconds for one rollout, unless a configuration says otherwise: an agent of dozens of calls needs minutes.
TIMEOUT_S = 600.0
#: Seconds in which a gateway is told that a rollout was cancelled, or that it could not be reached before: whoever
#: waits here wants to end.
LAST_WORD_S = 5.0
#: Characters of what an agent printed or raised that a failure keeps: the end of a traceback.
MAX_OUTPUT = 4_000
#: Characters of its detail, and of the last line of its output, that its message has: it stands in lists.
MAX_PART = 200

Flow = TypeVar("Flow", bound="type[AgentFlowBase]")

#: The flows by their names, as `register` was told.
FLOWS: dict[str, type[AgentFlowBase]] = {}


class AgentFailed(HeadraceError):
    """A rollout that went wrong by its agent. `reason` is one of

    crashed     it raised an error, or its process was ended by a signal
    exit_code   its process ended with another code than 0
    hung        it did not end within `timeout_s`
    no_calls    it ended without one call of the model
    refused     the gateway refused what it asked for

    `detail` says more in a sentence, and `output` is the end of what it printed, or its traceback. The message has all
    three, of the output the last line.
    """

    code = "agent_failed"

    def __init__(self, reason: str, detail: str = "", output: str = "") -> None:
        self.reason, self.detail, self.output = reason, detail.strip(), output.strip()[-MAX_OUTPUT:]
        parts = [reason, self.detail, self.output.rpartition("\n")[2]]
        lines = [" ".join(part.split())[:MAX_PART] for part in parts]
        super().__init__(": ".join(dict.fromkeys(line for line in lines if line)))

    @classmethod
    def of(cls, error: BaseException) -> AgentFailed:
        """The failure that an agent's own error is."""
        told = traceback.format_exception_only(error)[-1]
        return cls("crashed", told, "".join(traceback.format_exception(error)))


class WorkerLost(AgentFailed):
    """The process that played a rollout for this one is gone: not its agent's fault, and not charged to it."""

    code = "worker_lost"

    def __init__(self, detail: str) -> None:
        super().__init__("worker_lost", detail)
        self.args = (detail,)


class AgentFlowBase(ABC):
    """What plays rollouts through one gateway, any number at once: a flow keeps nothing of one in itself.

    `model` is the name that is asked for where a gateway serves several; `sampling` overrides what every call of the
    trajectory asks for (a temperature, a seed). `timeout_s` bounds one rollout.
    """

    def __init__(
        self,
        gateway: GatewayClient,
        *,
        timeout_s: float = TIMEOUT_S,
        model: str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.gateway = gateway
        self.timeout_s = timeout_s
        self.model = model
        self.sampling = dict(sampling or {})

    async def run(self, task: Task) -> None:
        """Plays a task's rollout to its end. Afterwards the trajectory is complete, or it is failed and `AgentFailed`
        is raised. Raises `TrajectoryEnded` where it had ended before, and `NoAnswer` or `GatewayRefused` where the
        gateway is away or has no such trajectory."""
        handle = await self.gateway.init_trajectory(replace(task, sampling={**self.sampling, **task.sampling}))
        try:
            reward = await self._played(task, handle)
            ended = await self.gateway.complete(handle, reward, min_steps=1)
            if ended.status == "too_few":
                raise AgentFailed("no_calls", "the agent ended without one call of the model that was recorded")
        except AgentFailed as error:
            await self.gateway.fail(handle, str(error))
            raise
        except (asyncio.CancelledError, Exception) as error:
            await self._last_word(handle, error)
            raise

    @abstractmethod
    async def play(self, task: Task, handle: Handle) -> float | None:
        """Plays the rollout in a trajectory that is begun: by calls of `handle.base_url`, or by `generate` and
        `submit_steps`. Returns a reward for the trajectory, or None where another scores it."""

    async def aclose(self) -> None:  # noqa: B027 # most keep nothing
        """Ends what the flow keeps running between rollouts. The gateway's client is its maker's to close."""

    # -- for flows that handle tokens themselves -----------------------------------------------------------------------

    async def generate(
        self,
        task: Task,
        handle: Handle,
        *,
        prompt_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | None = None,
        stop_ids: Iterable[int] = (),
    ) -> Generation:
        """Samples an answer to ids, or to messages that the gateway renders. It records nothing: see `submit_steps`.

        What is configured goes before `sampling`. `stop_ids` end the answer beside what is configured: those of a turn,
        where ids are given, which the gateway adds to messages of its own accord.
        """
        given = {**(sampling or {}), **self.sampling, **task.sampling}
        if (ends := set(stop_ids)) and not given.get("ignore_eos"):
            given["stop_token_ids"] = sorted(ends.union(given.get("stop_token_ids") or ()))
        return await self.gateway.generate(
            prompt_ids=prompt_ids,
            messages=messages,
            tools=tools,
            sampling=given,
            model=self.model,
            handle=handle,
        )

    async def submit_steps(
        self, task: Task, handle: Handle, sampled: Sequence[Generation], *, first: int = 0, **fields: Any
    ) -> None:
        """Hands in what was sampled, exactly, as the trajectory's steps from index `first` on; `fields` are each
        step's (`reward`, `metadata`, ...)."""
        steps = []
        for at, one in enumerate(sampled):
            known = one.step_fields()
            place = {"trajectory_uid": handle.trajectory_uid, "prompt_uid": handle.prompt_uid, "step_index": first + at}
            metadata = {**known["metadata"], **(fields.get("metadata") or {})}
            steps.append({**known, **place, **fields, "metadata": metadata})
        await self.gateway.submit_steps(steps, task.channel)

    async def compute_reward(self, task: Task, sampled: Generation, *, num_turns: int = 1) -> ComputedReward:
        """What the gateway's reward worker gives an answer to the task's row. Raises `GatewayRefused` where the
        gateway has none."""
        return await self.gateway.compute_reward(
            prompt_ids=sampled.prompt_ids,
            response_ids=sampled.response_ids,
            dataset_fields=task.row,
            num_turns=num_turns,
        )

    async def _played(self, task: Task, handle: Handle) -> float | None:
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                return await self.play(task, handle)
        except (AgentFailed, NoAnswer):
            raise
        except GatewayRefused as error:
            if error.status >= 500:
                raise
            raise AgentFailed("refused", str(error)) from error
        except TimeoutError as error:
            if not limit.expired():
                raise AgentFailed.of(error) from error
            # Who was cancelled notes what the agent had printed; no cause of the time-out, but its context, on 3.11.2.
            notes = getattr(error.__context__, "__notes__", [])
            raise AgentFailed("hung", f"it did not end within {self.timeout_s:g} s", "\n".join(notes)) from None
        except Exception as error:
            raise AgentFailed.of(error) from error

    async def _last_word(self, handle: Handle, error: BaseException) -> None:
        """Tells the gateway, where it can be told soon, that nothing more comes."""
        reason = "cancelled" if isinstance(error, asyncio.CancelledError) else f"gateway: {error}"
        told = asyncio.ensure_future(self.gateway.fail(handle, reason, patience_s=0.0))
        await asyncio.wait([told], timeout=LAST_WORD_S)
        if not told.done():
            told.cancel()
        elif not told.cancelled():
            told.exception()  # seen: what was raised before says more


def register(name: str) -> Callable[[Flow], Flow]:
    """Has a flow's class known by a name, for `agent: {flow: NAME}`. Raises `InvalidInput` where another has it."""

    def named(flow: Flow) -> Flow:
        known = FLOWS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (flow.__module__, flow.__qualname__):
            raise InvalidInput(f"the flow {name!r} is {known.__module__}.{known.__qualname__}; choose another name")
        FLOWS[name] = flow
        return flow

    return named
