"""`Rule`: a score that is computed from an answer, without asking anyone; and what rules share.

Options are the fields of a rule's class. An answer that a rule finds wrong gets a low score; where the rule itself
cannot say, as without a ground truth, it raises `RewardFailure`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from headrace.rewards.answers import THOUGHT
from headrace.rewards.sample import RewardFailure, Sample, Score

FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)

#: Where a rule is computed: at once; in a process of its own, which ends with its time limit; in a thread, by rules
#: that bound their own time.
Place = Literal["here", "process", "thread"]
Kind = TypeVar("Kind", bound="type[Rule]")

#: The rules by their names.
RULES: dict[str, type[Rule]] = {}


class Rule(BaseModel):
    """A rule with its options."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    place: ClassVar[Place] = "here"

    def ready(self) -> None:
        """Called before the first sample of a rule that is computed in threads. Raises `InvalidInput` where it can
        score nothing on this machine."""

    def close(self) -> None:
        """Called at the end of a rule that is computed in threads: ends what calls of `score` have started and wait
        for, which then raise `RewardFailure`, as later ones do."""

    @abstractmethod
    def score(self, sample: Sample) -> float | Score:
        """What the answer is worth. Raises `RewardFailure` where that cannot be said."""


def rule(name: str) -> Callable[[Kind], Kind]:
    """Registers a rule under a name."""

    def registered(kind: Kind) -> Kind:
        RULES[name] = kind
        return kind

    return registered


def truth_of(sample: Sample) -> Any:
    """A sample's ground truth; raises `RewardFailure` where there is none."""
    if sample.ground_truth is None:
        raise RewardFailure(
            "the sample has no ground truth: name its column by `ground_truth`, or call it so in the row",
            again=False,
        )
    return sample.ground_truth


def behind_thoughts(text: str) -> str:
    """The text after the last `</think>`; all of it where there is none."""
    return text.rpartition(THOUGHT)[2]


def last_block(text: str) -> str | None:
    """The last fenced block of a text; None where there is none."""
    found = FENCED.findall(text)
    return found[-1] if found else None
