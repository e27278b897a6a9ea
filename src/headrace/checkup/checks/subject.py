"""What a check is about, and what every check says to it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.checkup.answer import Answer, Ask, Json, Stream
from headrace.checkup.dialects import Dialect
from headrace.checkup.target import Target
from headrace.checkup.words import Words

QUESTION = "Tell a short story about a river."


@dataclass(frozen=True, slots=True)
class Subject:
    """One server in one dialect. `completions`: it has those beside."""

    target: Target
    dialect: Dialect
    words: Words
    completions: bool = False

    @property
    def question(self) -> list[Json]:
        return self.dialect.question(QUESTION)

    async def once(self, ask: Ask) -> list[Answer]:
        """The answers to one question, in a conversation of its own, with what was recorded of them."""
        return (await self.streamed(ask))[0]

    async def streamed(self, ask: Ask) -> tuple[list[Answer], Stream]:
        conversation = await self.target.begin(self.dialect)
        answers, stream = await conversation.streamed(ask)
        await conversation.end()
        return answers, stream
