"""A conversation of ten answers that any dialect can hold: reasoning, words, one call, two calls, five questions.

What the model says is sampled in odd tokens, which no encoder would give: only a gateway that keeps what was sampled
goes on from them exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.gateway.kit import Running, tree
from tests.gateway.rollout import Rollout, Say, in_front, log_probs_of
from tests.tokens import models
from tests.tokens.kit import FORMATS, STOPS, sampled, spoken

from headrace.tokens import ToolCall

Json = dict[str, Any]

MODEL = "qwen3"
SYSTEM = "Be brief, but 正確."
PARAMETERS: Json = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}


@dataclass(frozen=True)
class Answer:
    """One answer of the model; `calls` are what it adds."""

    content: str = ""
    reasoning: str | None = None
    calls: tuple[tuple[int, int], ...] = ()

    def ids(self) -> list[int]:
        calls = [ToolCall("add", {"a": a, "b": b}) for a, b in self.calls]
        text = spoken(FORMATS[MODEL], self.content, self.reasoning, calls)
        return sampled(models.renderer(MODEL), text, [3, 7, 11, 19, 20, 31], None)


#: Each question, and the answers until one calls nothing.
PLAY: list[tuple[str, list[Answer]]] = [
    (
        "What is 1 + 2, and 3 + 4, and 5 + 6?",
        [
            Answer(calls=((1, 2),), reasoning="One after the other.\nFirst 1 + 2."),
            Answer("Now the other two.", calls=((3, 4), (5, 6))),
            Answer("They are 3, 7 and 11.", reasoning="All done: größer 🙂"),
        ],
    ),
    ("Thanks!", [Answer("You are welcome.")]),
    (
        "And 7 + 8, then 9 + 10?",
        [
            Answer(calls=((7, 8),)),
            Answer(calls=((9, 10),), reasoning="15 it was."),
            Answer("15 and 19."),
        ],
    ),
    ("20 + 21?", [Answer("Let me see:", calls=((20, 21),)), Answer("41.", reasoning="Easy.")]),
    ("Good bye.", [Answer("Bye.\n\nTake care.", reasoning="The end.")]),
]
QUESTIONS = [question for question, _ in PLAY]
ANSWERS = [answer for _, answers in PLAY for answer in answers]
#: What the agent is told at last, question by question.
TOLD = [answers[-1].content for _, answers in PLAY]


class Stage:
    """A gateway in front of a scripted model that plays its part once a trajectory."""

    def __init__(self, gateway: Running, rollout: Rollout) -> None:
        self.gateway, self.rollout = gateway, rollout

    def begin(self) -> str:
        """The base_url of a new trajectory; the model is at its first answer."""
        self.rollout.forget()
        self.rollout.script += [Say(ids=answer.ids()) for answer in ANSWERS]
        return str(self.gateway.init()["base_url"])

    def holds(self, base: str) -> None:
        """All ten answers are steps of one line: what was consumed and sampled, each beginning with the one before."""
        steps = self.gateway.steps(base.split("/")[3])
        said = [[*answer.ids(), self.rollout.end] for answer in ANSWERS]
        assert [step.prompt_ids.tolist() for step in steps] == [order["prompt"] for order in self.rollout.orders]
        assert [step.response_ids.tolist() for step in steps] == said
        assert [step.rollout_log_probs.tolist() for step in steps] == [log_probs_of(ids) for ids in said]
        assert tree(steps) == [None, *range(len(said) - 1)]
        assert [step.quarantined for step in steps] == [None] * len(said)


@contextmanager
def staged() -> Iterator[Stage]:
    with (
        Rollout(models.vocabulary(MODEL), STOPS[MODEL]) as rollout,
        in_front(rollout, models.folder(MODEL)) as gateway,
    ):
        yield Stage(gateway, rollout)
