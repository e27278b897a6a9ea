"""Ids to text where they continue other ids.

A SentencePiece model writes a space before every word, also before the first of a text, and takes that one away when it
decodes: alone, the ids of an answer say `Hello`, behind their prompt ` Hello`. Such ids are decoded behind the last ids
of their prompt, as rollout servers do. Byte-level vocabularies need none of this: each token is its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from headrace.data.step import IntArray

#: A list of ids as text.
Decode = Callable[[list[int]], str]
#: The ids of a prompt, of which only the last ones are looked at.
PromptIds = Sequence[int] | IntArray

#: What a tokenizer writes for bytes that are no character (yet).
REPLACEMENT_CHARACTER = "\ufffd"

#: Ids of a prompt that are decoded before an answer's. One with visible text would do; more, because some show nothing.
TAIL_TOKENS = 16
#: As many where those show nothing.
LONG_TAIL_TOKENS = 256
#: Bytes of a character at most: so many places may be tried for the beginning of one.
CHARACTER_BYTES = 4


class ContinuedText:
    """The text of ids that come one by one behind a prompt's, as vLLM says it (with `DecodeStream` of tokenizers).

    An id is decoded behind those of the piece that was given out last; its text is what that adds. It is held back
    while it adds nothing or ends in what may still become a character. A byte may spoil a character that was given out
    already, since byte fall-back decodes a run of bytes as a whole: then what is held back is lost, and the text begins
    anew with the next id that is no byte, as it does in vLLM.
    """

    __slots__ = ("_decode", "_given", "_ids", "_read")

    def __init__(self, decode: Decode, prompt: list[int]) -> None:
        """`prompt` are the ids before the first one. Where they end inside a character, their text is given out with
        the first piece, which is vLLM's way; `whole_characters` leaves such an end out."""
        self._decode = decode
        self._ids = list(prompt)
        self._given = ""  # the text of the first `_read` ids
        self._read = 0
        self._begin()

    def _begin(self) -> None:
        text = self._decode(self._ids) if self._ids else ""
        if not text.endswith(REPLACEMENT_CHARACTER):
            self._given, self._read = text, len(self._ids)

    def add(self, token: int) -> str:
        """The text that is certain now."""
        if not self._given:
            self._begin()
        self._ids.append(token)
        text, given = self._decode(self._ids), self._given
        if text.endswith(REPLACEMENT_CHARACTER):
            return ""
        if not text.startswith(given):
            if len(text.encode()) <= len(given.encode()):
                return ""
            self._ids, self._given, self._read = [], "", 0
            return self.add(token)
        if len(text) == len(given):
            return ""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._given = self._decode(self._ids)
        return text[len(given) :]

    def rest(self) -> str:
        """What is held back: bytes that did not become a character, as U+FFFD. Nothing may be added afterwards."""
        text, given = self._decode(self._ids), self._given
        self._ids, self._given, self._read = [], "", 0
        return text[len(given) :] if text.startswith(given) else REPLACEMENT_CHARACTER


def prompt_tail(decode: Decode, prompt: PromptIds) -> list[int]:
    """As many of a prompt's last ids as it takes to decode what follows as behind all of it: those with a text that is
    not empty and does not end inside a character; all of them where fewer have none."""
    for size in (TAIL_TOKENS, LONG_TAIL_TOKENS):
        if len(prompt) <= size:
            break
        ids = [int(token) for token in prompt[-size:]]
        for start in range(CHARACTER_BYTES):  # the first ids may be the last bytes of a character
            text = decode(ids[start:])
            if text and not text.endswith(REPLACEMENT_CHARACTER):
                return ids[start:]
    return [int(token) for token in prompt]


def whole_characters(decode: Decode, ids: list[int]) -> list[int]:
    """Ids without those at their end that do not make a whole character."""
    if not decode(ids).endswith(REPLACEMENT_CHARACTER):
        return ids
    found = ids[-LONG_TAIL_TOKENS:]
    while found and decode(found).endswith(REPLACEMENT_CHARACTER):
        found.pop()
    return found


def space_marker(backend: Any) -> str | None:
    """The character that a vocabulary writes for a space where decoding takes one away before a token that stands
    alone; None where it does not. `backend` is a tokenizer of the tokenizers library."""
    step = getattr(backend, "pre_tokenizer", None)
    if step is None:
        return None
    found = json.loads(step.__getstate__())
    steps = found.get("pretokenizers", [found])
    return next((str(one.get("replacement", "▁")) for one in steps if one.get("type") == "Metaspace"), None)


def token_text(backend: Any, marker: str | None, token: int) -> str:
    """The text of one token, with the spaces that it has in a text; `marker` as `space_marker` finds it."""
    text: str = backend.decode([token], skip_special_tokens=False)
    if marker is None:
        return text
    written: str = backend.id_to_token(token) or ""
    spaces = len(written) - len(written.lstrip(marker))
    return " " * (spaces - (len(text) - len(text.lstrip(" ")))) + text
