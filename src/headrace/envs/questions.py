"""Questions from a JSON lines file: most are trained on, the last ones are held out for evaluations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field

from headrace.data.errors import InvalidInput, shown
from headrace.envs.conversation import ConversationConfig


class QuestionsConfig(ConversationConfig):
    path: str | None = Field(None, description="JSON lines file of questions; default: a few that come with it")
    question_key: str = Field("question", description="where a line has its question")
    answer_key: str = Field("answer", description="where a line has its answer")
    eval_items: int = Field(8, ge=1, description="questions at the file's end that only evaluations ask")


class Questions:
    """`trained` and `held_out`; iterating gives those that are trained on for ever, each once before any again."""

    def __init__(self, config: QuestionsConfig, default: Path, *, answered: bool) -> None:
        path = Path(config.path) if config.path else default
        found = list(_read(path, config.question_key, config.answer_key, answered))
        if len(found) <= config.eval_items:
            raise InvalidInput(
                f"{path} has {len(found)} questions, and {config.eval_items} are held out: "
                "set eval_items lower, or add questions"
            )
        self.trained, self.held_out = found[: -config.eval_items], found[-config.eval_items :]
        self._random = random.Random(config.seed)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self._random.sample(self.trained, len(self.trained))


def _read(path: Path, question_key: str, answer_key: str, answered: bool) -> Iterator[dict[str, Any]]:
    """Items with `question` and, where a line has one or must have one, `answer`."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise InvalidInput(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get(question_key), str):
            raise InvalidInput(f"{path}, line {number} has no text {question_key!r}: {shown(row)}")
        answer = row.get(answer_key)
        if answered and (isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == ""):
            raise InvalidInput(f"{path}, line {number} has no text or number {answer_key!r}: {shown(row)}")
        yield {"question": row[question_key]} | ({} if answer is None else {"answer": str(answer)})
