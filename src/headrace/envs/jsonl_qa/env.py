"""`jsonl_qa`: questions and answers from a file; math-verify says what is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from headrace.envs.conversation import ChatEndpoint, ConversationEnv, Messages, Questions, QuestionsConfig
from headrace.envs.jsonl_qa.checker import Checker
from headrace.envs.types import Item

SAMPLE = Path(__file__).with_name("sample.jsonl")


class JsonlQaConfig(QuestionsConfig):
    """Where the questions are, and how answers are checked."""

    instruction: str = Field(
        "Reason step by step, and put your final answer in \\boxed{}.", description="what stands behind each question"
    )
    checkers: int = Field(2, ge=1, description="processes that check answers")
    check_s: int = Field(5, ge=1, description="seconds of processor time that a check may take")


class JsonlQaEnv(ConversationEnv):
    """One point for the right answer, however it is written: 1/2, 0.5 and \\frac{1}{2} are the same."""

    name = "jsonl_qa"
    env_config_cls = JsonlQaConfig
    config: JsonlQaConfig
    checker: Checker | None = None

    async def setup(self) -> None:
        self.questions = Questions(self.config, SAMPLE, answered=True)
        self.next = iter(self.questions)
        self.checker = Checker(self.config.checkers, self.config.check_s)

    async def get_next_item(self) -> Item:
        return next(self.next)

    def held_out(self) -> list[Item]:
        return self.questions.held_out

    async def play(self, server: ChatEndpoint, item: Item, **sampling: Any) -> tuple[Messages, float]:
        assert self.checker is not None, "setup() comes first"
        messages: Messages = [{"role": "user", "content": f"{item['question']}\n\n{self.config.instruction}"}]
        said = (await self.said(server, messages, **sampling)).content or ""
        right = await self.checker.is_right(said, item["answer"])
        return [*messages, {"role": "assistant", "content": said}], float(right)

    async def close(self) -> None:
        if self.checker is not None:
            self.checker.close()
        await super().close()
