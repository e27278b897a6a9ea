"""Ids to text as they arrive: what was given out never changes, and no character is given out half.

The deltas' concatenation is the text of all the ids, however they were cut up.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from headrace.tokens.vocabulary import Vocabulary


class Detokenizer:
    """Text of one answer, piece by piece. Special tokens are left out, except those in `keep`."""

    def __init__(self, vocabulary: Vocabulary, *, keep: frozenset[int] = frozenset()) -> None:
        self._vocabulary = vocabulary
        self._dropped = vocabulary.special - keep
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain now."""
        kept = ids if self._dropped.isdisjoint(ids) else [i for i in ids if i not in self._dropped]
        if self._vocabulary.bytewise:
            return self._utf8.decode(self._vocabulary.bytes_of(kept))
        return "".join(self._window(i) for i in kept)

    def finish(self) -> str:
        """What was held back: an incomplete character at the end, as U+FFFD."""
        if self._vocabulary.bytewise:
            return self._utf8.decode(b"", final=True)
        before = self._vocabulary.decode(self._ids[self._prefix : self._read])
        text = self._vocabulary.decode(self._ids[self._prefix :])[len(before) :]
        self._prefix = self._read = len(self._ids)
        return text

    def _window(self, token_id: int) -> str:
        self._ids.append(token_id)
        before = self._vocabulary.decode(self._ids[self._prefix : self._read])
        now = self._vocabulary.decode(self._ids[self._prefix :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        # The last piece given out stays in view: such tokenizers decide a leading space by what comes before.
        self._prefix, self._read = self._read, len(self._ids)
        return now[len(before) :]


def text_of(vocabulary: Vocabulary, ids: Sequence[int], *, keep: frozenset[int] = frozenset()) -> str:
    """The text of ids at once; what a `Detokenizer`'s deltas add up to."""
    stream = Detokenizer(vocabulary, keep=keep)
    return stream.feed(ids) + stream.finish()
