"""`number_guess`: a hidden number, so many guesses, each answered "higher" or "lower"."""

from __future__ import annotations

import random
import re
from typing import Any

from pydantic import Field

from headrace.envs.conversation import (
    ChatEndpoint,
    ConversationConfig,
    ConversationEnv,
    Messages,
)
from headrace.envs.types import Item

NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")


class NumberGuessConfig(ConversationConfig):
    """The range of the hidden number, and the guesses of a game."""

    largest: int = Field(100, ge=2, description="the hidden number is from 1 to this")
    guesses: int = Field(7, ge=1, description="guesses of a game; binary search needs log2(largest), rounded up")
    answer_tokens: int = Field(64, ge=1, description="most tokens of one guess")


class NumberGuessEnv(ConversationEnv):
    """The last number of an answer is the guess. A hit scores 1, or less the later it comes, but more than half."""

    name = "number_guess"
    env_config_cls = NumberGuessConfig
    config: NumberGuessConfig

    async def setup(self) -> None:
        self.random = random.Random(self.config.seed)

    async def get_next_item(self) -> Item:
        return self.game(self.random.randint(1, self.config.largest))

    def held_out(self) -> list[Item]:
        """Numbers from all over the range."""
        largest, count = self.config.largest, min(self.config.eval_items, self.config.largest)
        return [self.game(1 + at * largest // count) for at in range(count)]

    def game(self, hidden: int) -> Item:
        """The item of a hidden number."""
        asked = (
            f"I am thinking of a whole number from 1 to {self.config.largest}. "
            f"Find it in {self.config.guesses} guesses or fewer. Say one number at a time; I answer higher or lower."
        )
        return {"question": asked, "answer": str(hidden)}

    async def play(self, server: ChatEndpoint, item: Item, **sampling: Any) -> tuple[Messages, float]:
        messages: Messages = [{"role": "user", "content": item["question"]}]
        for guesses in range(self.config.guesses):
            if guesses:
                messages.append({"role": "user", "content": self.hint(messages[-1]["content"], int(item["answer"]))})
            said = (await self.said(server, messages, **sampling)).content or ""
            messages.append({"role": "assistant", "content": said})
            if guess_of(said) == int(item["answer"]):
                return messages, 1.0 - guesses / (2 * self.config.guesses)
        return messages, 0.0

    def hint(self, said: str, hidden: int) -> str:
        """The answer to a wrong guess."""
        guess = guess_of(said)
        if guess is None:
            return f"Say a number from 1 to {self.config.largest}."
        return "higher" if guess < hidden else "lower"


def guess_of(said: str) -> int | None:
    """The last number of an answer; None where there is none."""
    found = NUMBER.findall(said)
    return int(found[-1]) if found else None
