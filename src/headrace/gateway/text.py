"""The answer to a text completion: no reasoning, no calls, only text up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.tokens import (
    AnswerDelta,
    Detokenizer,
    Parsed,
    Vocabulary,
)
from headrace.tokens.parse import StopCut


class PlainStream:
    """Ids in, text out."""

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._cut = StopCut(stop)
        self._text: list[str] = []

    def feed(self, ids: Sequence[int]) -> AnswerDelta:
        return self._add(self._cut.feed(self._detokenizer.feed(ids)))

    def finish(self) -> AnswerDelta:
        return self._add(self._cut.feed(self._detokenizer.finish()) + self._cut.finish())

    def _add(self, text: str) -> AnswerDelta:
        if text:
            self._text.append(text)
        return AnswerDelta(text)

    @property
    def parsed(self) -> Parsed:
        return Parsed("".join(self._text))
