"""An environment that a model with random weights learns in a minute or two: find a number with "higher" and "lower".

Its words are those of the demo's model (`python -m headrace.demo.model FOLDER`), a token each. docs/environments.md has
the commands around it, under "A trainer for it".
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from headrace.envs import ConversationConfig, ConversationEnv, Item


class NumberConfig(ConversationConfig):
    largest: int = Field(3, ge=2, le=6, description="the hidden number is from 1 to this")
    guesses: int = Field(2, ge=1, description="guesses of a game; with 2 ** guesses - 1 numbers, binary search wins")
    answer_tokens: int = Field(1, ge=1, description="most tokens of one guess")
    group_size: int = Field(8, ge=1, description="games with the same hidden number")


class NumberEnv(ConversationEnv):
    """One point for a hit. A guess is the number alone: anything else ends the game."""

    name = "number"
    env_config_cls = NumberConfig
    config: NumberConfig

    async def setup(self) -> None:
        self.numbers = self.shuffled(random.Random(self.config.seed))

    def shuffled(self, chance: random.Random) -> Iterator[int]:
        """Every number as often as any other, so that none is worth guessing more than the rest."""
        while True:
            yield from chance.sample(self.held_out(), self.config.largest)

    def held_out(self) -> list[int]:
        return list(range(1, self.config.largest + 1))

    async def get_next_item(self) -> Item:
        return next(self.numbers)

    def gold_answer(self, item: int) -> str:
        return str(item)

    async def play(self, server: Any, item: int, **sampling: Any) -> tuple[list[dict[str, Any]], float]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "guess"}]
        for left in reversed(range(self.config.guesses)):
            said = (await self.said(server, messages, **sampling)).content or ""
            messages.append({"role": "assistant", "content": said})
            if said not in map(str, self.held_out()):
                break
            if int(said) == item:
                return messages, 1.0
            if left:
                messages.append({"role": "user", "content": "higher" if int(said) < item else "lower"})
        return messages, 0.0


if __name__ == "__main__":
    NumberEnv.cli()
