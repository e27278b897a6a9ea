"""The task: sums and differences of a few small numbers, from `reasoning_gym`, which also says whether one is right.

Problems that are held out never come up in training: not their numbers in the generator, and not their text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import reasoning_gym

TASK = "chain_sum"
SIZES = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
#: The generator numbers its problems; held-out ones begin here.
HELD_OUT = 100_000_000
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    answer: str
    entry: dict[str, Any]

    def reward(self, reply: str, *, whole: bool) -> float:
        """1 where the last number of the reply is the answer, else 0. A reply that was cut has not answered."""
        numbers = NUMBER.findall(reply)
        if not numbers or not whole:
            return 0.0
        score = reasoning_gym.get_score_answer_fn(TASK)(numbers[-1], self.entry)
        return float(score == 1.0)  # it also pays a little where the answer is a part of another number


def held_out(size: int) -> list[Problem]:
    """The problems of a validation, all different."""
    found: dict[str, Problem] = {}
    for problem in _problems(HELD_OUT):
        found.setdefault(problem.question, problem)
        if len(found) == size:
            break
    return list(found.values())


def training(first: int, without: list[Problem]) -> Iterator[Problem]:
    """An endless supply from a number on, that leaves out some."""
    left_out = {problem.question for problem in without}
    return (problem for problem in _problems(first) if problem.question not in left_out)


def _problems(first: int) -> Iterator[Problem]:
    dataset = reasoning_gym.create_dataset(TASK, seed=0, size=2 * HELD_OUT, **SIZES)
    for number in count(first):
        entry = dataset[number]
        yield Problem(entry["question"], entry["answer"], entry)
