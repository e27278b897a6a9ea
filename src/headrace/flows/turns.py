"""Flows that handle tokens themselves: what is sampled by ids is handed in as steps, exactly.

`SingleTurnFlow` asks for one answer to a row's messages. `MultiStepFlow` holds a conversation: each prompt begins, bit
for bit, with the prompt and the answer before it, and only what is new is rendered (`headrace.tokens`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.data.errors import InvalidInput
from headrace.flows.flow import AgentFlowBase, register
from headrace.flows.gateway_client import GatewayClient, Generation, Handle
from headrace.flows.task import Task
from headrace.tokens import Conversation, History, Message, Renderer, load_renderer, plan_prompt, read_messages
from headrace.tokens.messages import to_dict

#: Turns of a conversation, unless a configuration says otherwise.
MAX_TURNS = 8


@register("single_turn")
class SingleTurnFlow(AgentFlowBase):
    """One question, one answer: one step. With `score`, the gateway's reward worker says at once what it is worth."""

    def __init__(
        self,
        gateway: GatewayClient,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        score: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(gateway, **options)
        self.tools, self.score = list(tools), score

    async def play(self, task: Task, handle: Handle) -> float | None:
        """Samples one answer and hands it in."""
        sampled = await self.generate(task, handle, messages=task.messages, tools=self.tools)
        await self.submit_steps(task, handle, [sampled])
        return (await self.compute_reward(task, sampled)).reward_score if self.score else None


class TurnAnswer(msgspec.Struct, frozen=True):
    """The model's answer in one turn, which counts from 0: its text, its message in OpenAI's form (with `tool_calls`,
    where it made any), and how it ended."""

    turn: int
    text: str
    message: dict[str, Any]
    stop_reason: str | None


class MultiStepFlow(AgentFlowBase):
    """A conversation of several turns, each of which is a step: inherit, and say in `observe` what comes after an
    answer. `tokenizer` is the model's folder; `max_turns` bounds the conversation."""

    def __init__(
        self,
        gateway: GatewayClient,
        *,
        tokenizer: str | Path,
        max_turns: int = MAX_TURNS,
        tools: Sequence[Mapping[str, Any]] = (),
        score: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(gateway, **options)
        if max_turns < 1:
            raise InvalidInput(f"max_turns is {max_turns}; a conversation has at least 1")
        self.max_turns, self.tools, self.score = max_turns, list(tools), score
        self.renderer: Renderer = load_renderer(tokenizer)

    @abstractmethod
    async def observe(self, task: Task, answer: TurnAnswer) -> list[dict[str, Any]] | None:
        """The messages that follow an answer (a tool's result, a user's next words); None ends the conversation."""

    def first_messages(self, task: Task) -> list[dict[str, Any]]:
        """What the conversation begins with: the row's messages."""
        return task.messages

    async def play(self, task: Task, handle: Handle) -> float | None:
        """Holds the conversation, and hands all of its steps in at once."""
        history = History()
        messages = list(read_messages(self.first_messages(task)))
        sampled: list[Generation] = []
        while len(sampled) < self.max_turns:
            found, answer = await self._turn(task, handle, history, messages, len(sampled))
            sampled.append(found)
            stop_reason = found.stop_reason
            shown = TurnAnswer(len(sampled) - 1, answer.content, to_dict(answer), stop_reason)
            new = await self.observe(task, shown)
            if new is None:
                break
            messages += [answer, *read_messages(new)]
        await self.submit_steps(task, handle, sampled)
        if not self.score:
            return None
        return (await self.compute_reward(task, sampled[-1], num_turns=len(sampled))).reward_score

    async def _turn(
        self, task: Task, handle: Handle, history: History, messages: Sequence[Message], number: int
    ) -> tuple[Generation, Message]:
        """What was sampled next, and the same as a message; the history then has it."""
        conversation = Conversation(messages, self.tools or None)
        plan = plan_prompt(self.renderer, history, conversation)
        found = await self.generate(task, handle, prompt_ids=plan.ids.tolist(), stop_ids=self.renderer.stop_ids)
        answer = self.renderer.parse(plan.ids.tolist(), found.response_ids, tools=bool(self.tools)).message
        record = history.record(conversation, answer, plan.parent)
        history.add(record, plan.ids, np.asarray(found.response_ids, np.int32), plan.parent, number)
        return found, answer
