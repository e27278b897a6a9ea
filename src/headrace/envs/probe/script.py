"""Who answers which call. Policies take turns at beginning conversations, and each goes on with its own.

A call whose text begins with an earlier one and its answer continues that conversation. One that quotes an answer, but
not as the model's own turn, asks for a verdict on it: a judge answers, who does what an answer tells a judge to do, and
has no praise otherwise. Anything else begins a conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.envs.probe.policies import INSTRUCTION, VERDICT, Asked, Policy

#: A shorter answer may stand in a question by chance.
QUOTED = 12
#: A verdict of no praise, in the forms that judges are asked to give one.
REFUSED = "Score: 0\nRating: 0/10\n[[0]]\nVerdict: incorrect\nNO\n<score>0.0</score>\n\\boxed{0}"


@dataclass
class Call:
    """A question: all of it as text, what was asked last, and what comes between it and an answer in the next one.

    `task` tells rollouts apart that run side by side; None where it cannot. A call for several answers begins as many
    conversations, whatever came before it.
    """

    asked: str
    last: str
    joint: str
    several: bool = False
    task: int | None = None


@dataclass
class Said:
    policy: Policy
    call: Call
    text: str
    continued: int = 0

    @property
    def whole(self) -> str:
        return self.call.asked + self.call.joint + self.text


@dataclass
class Script:
    """`said` holds the policies' answers since `begin`, in order; `judged` tells whether a judge was ever asked."""

    said: list[Said] = field(default_factory=list)
    judged: bool = False
    _policies: Sequence[Policy] = ()
    _answer: str | None = None
    _turn: int = 0
    _by_task: dict[int, Policy] = field(default_factory=dict)

    def begin(self, policies: Sequence[Policy], answer: str | None) -> None:
        """Policies that know answer only where there is an answer to know."""
        self._policies = [policy for policy in policies if answer is not None or not policy.knows]
        self._answer, self._turn = answer, 0
        self.said, self._by_task = [], {}

    def answer(self, call: Call) -> tuple[Policy | None, str]:
        """The text to answer with, and the policy whose it is; None for a judge's."""
        before = self._goes_on(call)
        if before is None and self._is_judging(call):
            self.judged = True
            return None, VERDICT if INSTRUCTION in call.asked else REFUSED
        policy = None if call.several else before
        if policy is None:
            policy = self._by_task.get(call.task) if call.task is not None else None
        if policy is None:
            policy = self._policies[self._turn % len(self._policies)]
            self._turn += 1
        if call.task is not None:
            self._by_task[call.task] = policy
        return policy, policy.says(Asked(call.last, call.asked, self._answer))

    def _goes_on(self, call: Call) -> Policy | None:
        """Of answers with the same text, the one that was continued least goes on."""
        fits = [one for one in self.said if len(call.asked) > len(one.whole) and call.asked.startswith(one.whole)]
        if not fits:
            return None
        found = min(fits, key=lambda one: (-len(one.whole), one.continued))
        found.continued += 1
        return found.policy

    def _is_judging(self, call: Call) -> bool:
        return any(_is_quoted(one, call.asked) for one in self.said)


def _is_quoted(said: Said, asked: str) -> bool:
    """Whether a question shows an answer that is no echo of its own question, and not as the model's own turn."""
    text, joint = said.text, said.call.joint
    shown = len(text) >= QUOTED and text in asked and text not in said.call.asked
    return shown and not (joint and joint + text in asked)
