"""Ids to text, piece by piece.

Text is taken only when it can no longer change: bytes that do not yet make a character are held back, and what never
becomes one is never text (as in vLLM, where the text of an answer cut inside a character lacks its last bytes). Taking
ids one by one or all at once gives the same text.
"""

from __future__ import annotations

from typing import Any

#: What a tokenizer writes for bytes that are no character (yet).
BROKEN = "\ufffd"
#: Ids of the prompt that stand before the first one, so that it gets the space it has in a text.
CONTEXT = 5


class Text:
    """The text of one answer. `value` only grows, but for a stop string that is cut off at the end."""

    __slots__ = ("_decode", "_ids", "_known", "_read", "_searched", "_skip", "value")

    def __init__(self, tokenizer: Any, prompt: list[int], *, skip_special_tokens: bool = True) -> None:
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens
        self._ids = prompt[-CONTEXT:]
        self._read = len(self._ids)
        self._known = 0
        self._searched = 0
        self.value = ""

    def take(self, output: list[int]) -> None:
        """Takes what is new in `output`, which only ever grows."""
        new = output[self._known :]
        self._known = len(output)
        if new and not self._push(new):
            for token in new:
                self._push([token])

    def _push(self, new: list[int]) -> bool:
        """Takes some ids as one piece; False, and nothing taken, where several end inside a character."""
        ids = self._ids
        before = self._decode(ids[: self._read], skip_special_tokens=self._skip)
        now = self._decode([*ids, *new], skip_special_tokens=self._skip)
        whole = not now.endswith(BROKEN)
        if len(new) > 1 and not whole:
            return False
        ids.extend(new)
        if whole and len(now) > len(before):
            self.value += now[len(before) :]
            # Only what the next piece can depend on is kept: the piece before it.
            self._ids = ids[self._read :]
            self._read = len(self._ids)
        return True

    def pass_over(self) -> None:
        """No stop string is looked for in the text so far."""
        self._searched = len(self.value)

    def stopped(self, stops: tuple[str, ...], *, keep: bool) -> str | None:
        """The stop string that the text now holds, if any, cut off at its beginning (or, to `keep` it, at its end)."""
        start = max(0, self._searched - max(map(len, stops)) + 1)
        self._searched = len(self.value)
        for stop in stops:
            at = self.value.find(stop, start)
            if at >= 0:
                self.value = self.value[: at + len(stop) if keep else at]
                return stop
        return None
