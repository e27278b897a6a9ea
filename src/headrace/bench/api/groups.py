"""The groups that are posted: written before anything is measured, each with a first token that no other has."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

#: How many groups differ in more than their first token.
DIFFERENT = 32
VOCABULARY = 150_000
_NUMBER = "@number@"


class Groups:
    """Bodies of `size` sequences of `tokens` tokens: a quarter prompt, labels and log-probs as environments do it."""

    def __init__(self, size: int, tokens: int) -> None:
        rng = random.Random(0)
        self._texts = [
            tuple(json.dumps(_group(rng, size, tokens)).replace(f'"{_NUMBER}"', _NUMBER).split(_NUMBER))
            for _ in range(DIFFERENT)
        ]
        self._packed: dict[tuple[int, int], bytes] = {}

    def body(self, number: int, env: int) -> bytes:
        """The group whose first token is `number`."""
        before, between, after = self._texts[number % DIFFERENT]
        return f"{before}{number}{between}{env}{after}".encode()

    def packed(self, number: int, env: int) -> bytes:
        """As environments pack it; packed once, since that takes longer than whatever is measured."""
        if (number, env) not in self._packed:
            self._packed[number, env] = gzip.compress(self.body(number, env))
        return self._packed[number, env]


def _group(rng: random.Random, size: int, tokens: int) -> dict[str, Any]:
    """With places for the number and the environment."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(tokens // 4)]
    answers = [[rng.randrange(VOCABULARY) for _ in range(tokens - len(prompt))] for _ in range(size)]
    sequences: list[list[Any]] = [prompt + answer for answer in answers]
    sequences[0] = [_NUMBER, *sequences[0][1:]]
    return {
        "tokens": sequences,
        "masks": [[-100] * len(prompt) + answer for answer in answers],
        "scores": [round(rng.gauss(0, 1), 4) for _ in range(size)],
        "inference_logprobs": [
            [1.0] * len(prompt) + [round(-rng.expovariate(2.0), 6) for _ in answer] for answer in answers
        ],
        "ref_logprobs": None,
        "overrides": None,
        "group_overrides": None,
        "env_id": _NUMBER,
    }
