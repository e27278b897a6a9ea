"""The number game: guess 1 to 7 in three tries, told `higher` or `lower`. Its language has fourteen tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from headrace.data.step import Step

NUMBERS = 7
GUESSES = 3

#: The whole language of the game; a token's id is its place.
VOCABULARY = ("<start>", "guess", "from", "1", "2", "3", "4", "5", "6", "7", "to", "higher", "lower", "<end>")
ID = {word: at for at, word in enumerate(VOCABULARY)}
OPENING = tuple(ID[word] for word in ("<start>", "guess", "from", "1", "to", "7"))


def play_out(trajectory_uid: str, prompt_uid: str, hidden: int, rng: random.Random) -> Iterator[Step]:
    """One game by a policy that guesses uniformly at random: a step a guess, each prompt the game so far."""
    prompt = list(OPENING)
    for turn in range(GUESSES):
        guess = rng.randint(1, NUMBERS)
        response = [ID[str(guess)], ID["<end>"]]
        hit = guess == hidden
        last = hit or turn == GUESSES - 1
        yield Step(
            prompt_ids=prompt,
            response_ids=response,
            # The guess was one of seven; the end of a turn follows by rule.
            rollout_log_probs=[-math.log(NUMBERS), 0.0],
            trajectory_uid=trajectory_uid,
            prompt_uid=prompt_uid,
            step_index=turn,
            policy_version=0,
            reward=(1.0 if hit else 0.0) if last else None,
            is_last=last,
            finish_reason="stop",
            metadata={"game": "number", "policy": "random"},
        )
        if last:
            return
        prompt = [*prompt, *response, ID["higher" if hidden > guess else "lower"]]


def words(ids: list[int]) -> str:
    return " ".join(VOCABULARY[i] for i in ids)
