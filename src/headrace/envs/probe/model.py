"""The policies in the place of a model: `Script` decides which policy answers a call, `ScriptedModel` hands it on.

Policies take turns at starting conversations, and each continues its own. A call whose text begins with an earlier call
and its answer continues that conversation. One that quotes an answer, but not as the model's own turn, asks for a
verdict on it: it is answered by a judge who obeys instructions to a judge, and rates everything else as wrong. Any
other call starts a conversation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.envs.probe.policies import (
    INSTRUCTION,
    VERDICT,
    PolicyPrompt,
    ProbePolicy,
)
from headrace.envs.server.responses import plain_json
from headrace.envs.testing.fakes import FakeModel

#: How the fake server writes the model's turn after a conversation.
TURN = "\nassistant: "
USER, END = "<|im_start|>user\n", "<|im_end|>"
#: Characters of an answer from which on finding it in a prompt counts as a quotation; a shorter one may be chance.
MIN_QUOTED_CHARS = 12
#: The verdict "wrong", in the forms that judges are asked to give one.
WRONG_VERDICT = "Score: 0\nRating: 0/10\n[[0]]\nVerdict: incorrect\nNO\n<score>0.0</score>\n\\boxed{0}"


@dataclass
class ModelCall:
    """A call to the model: its whole text (`asked`), the last message, and what stands between it and its answer in the
    text of the next call (`joint`).

    `task` identifies the rollout where several run concurrently; None where it cannot. A call for several answers
    starts as many conversations, whatever came before it.
    """

    asked: str
    last: str
    joint: str
    several: bool = False
    task: int | None = None


@dataclass
class PolicyAnswer:
    """What a policy answered to a call, and how many later calls continued it."""

    policy: ProbePolicy
    call: ModelCall
    text: str
    continued: int = 0

    @property
    def whole(self) -> str:
        """The conversation up to and with this answer: a call that begins with it continues it."""
        return self.call.asked + self.call.joint + self.text


@dataclass
class Script:
    """`said` holds the policies' answers since `begin`, in order; `judged` is whether a verdict was ever asked for."""

    said: list[PolicyAnswer] = field(default_factory=list)
    judged: bool = False
    _policies: Sequence[ProbePolicy] = ()
    _answer: str | None = None
    _turn: int = 0
    _by_task: dict[int, ProbePolicy] = field(default_factory=dict)

    def begin(self, policies: Sequence[ProbePolicy], answer: str | None) -> None:
        """Starts a group; policies that need the item's answer take part only where it has one."""
        self._policies = [policy for policy in policies if answer is not None or not policy.knows]
        self._answer, self._turn = answer, 0
        self.said, self._by_task = [], {}

    def answer(self, call: ModelCall) -> tuple[ProbePolicy | None, str]:
        """The policy that answers, or None for the judge, and the answer's text."""
        before = self._goes_on(call)
        if before is None and self._is_judging(call):
            self.judged = True
            return None, VERDICT if INSTRUCTION in call.asked else WRONG_VERDICT
        policy = None if call.several else before
        if policy is None:
            policy = self._by_task.get(call.task) if call.task is not None else None
        if policy is None:
            policy = self._policies[self._turn % len(self._policies)]
            self._turn += 1
        if call.task is not None:
            self._by_task[call.task] = policy
        return policy, policy.says(PolicyPrompt(call.last, call.asked, self._answer))

    def _goes_on(self, call: ModelCall) -> ProbePolicy | None:
        """The policy whose conversation the call continues; of answers with the same text, the least continued one."""
        fits = [one for one in self.said if len(call.asked) > len(one.whole) and call.asked.startswith(one.whole)]
        if not fits:
            return None
        found = min(fits, key=lambda one: (-len(one.whole), one.continued))
        found.continued += 1
        return found.policy

    def _is_judging(self, call: ModelCall) -> bool:
        return any(_is_quoted(one, call.asked) for one in self.said)


def _is_quoted(said: PolicyAnswer, asked: str) -> bool:
    """Whether a call quotes an answer, other than as the model's own turn, that was no echo of its prompt."""
    text, joint = said.text, said.call.joint
    shown = len(text) >= MIN_QUOTED_CHARS and text in asked and text not in said.call.asked
    return shown and not (joint and joint + text in asked)


class ScriptedModel(FakeModel):
    """A model that answers what the script's policies do."""

    def __init__(self, script: Script, tokenizer: Any) -> None:
        super().__init__(lambda asked, chance: "", tokenizer)
        self.script = script
        self._root: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        """Called by the task that collects a group: calls from that very task do not identify a rollout."""
        self._root = asyncio.current_task()

    def answer(self, asked: str, kwargs: dict[str, Any]) -> tuple[list[int], str, str]:
        """The ids, the text and the finish reason of the answer of the policy whose turn it is."""
        task = asyncio.current_task()
        several = (kwargs.get("n") or 1) > 1
        messages = plain_json(kwargs.get("messages"))
        call = ModelCall(
            asked=asked,
            last=_last_of(messages) if messages else _last_turn(asked),
            joint=TURN if messages else "",
            several=several,
            task=None if several or task is None or task is self._root else id(task),
        )
        policy, text = self.script.answer(call)
        spoken = self.spoken(text, kwargs)
        if policy is not None:
            self.script.said.append(PolicyAnswer(policy, call, spoken[1]))
        return spoken


def _last_of(messages: list[dict[str, Any]]) -> str:
    """The text of the last message that is not the model's."""
    for message in reversed(messages):
        content = message.get("content")
        if message.get("role") != "assistant" and content:
            parts = content if isinstance(content, list) else [{"text": content}]
            return "\n".join(part["text"] for part in parts if isinstance(part, dict) and part.get("text"))
    return ""


def _last_turn(prompt: str) -> str:
    """The user's last turn in a rendered prompt; the whole prompt where no turn is found."""
    _, found, turn = prompt.rpartition(USER)
    return turn.partition(END)[0] if found else prompt
