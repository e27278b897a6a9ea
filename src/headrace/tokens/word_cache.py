"""`WordCache`: the ids of ASCII texts, put together from those of their words.

A byte-level BPE tokenizer cuts a text into words by a regular expression and encodes each by itself, so a word has the
same ids wherever it stands. Cutting an ASCII text by Python's own expressions and looking its words up takes a fraction
of what the tokenizer takes for it. It is done where nothing else is known to happen to a text: one of the `PATTERNS`,
no normalizer that changes ASCII, added tokens that are found as they are written. Everything else, and a text with many
words that are new, is the tokenizer's own; so is what a word becomes.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import Any

#: Words that are remembered, some 250 bytes each. Most texts name something that nobody names again (ids, sums, dates):
#: words that are not met any more are forgotten.
MAX_WORDS = 20_000
#: Characters of a word that is remembered.
MAX_WORD_CHARACTERS = 64
#: New words that are learned from any text, each by a call of the tokenizer's; and the share of a text's words that may
#: be new before the tokenizer is the quicker one: a word takes it three to five times as long alone as among others.
MAX_NEW_WORDS = 16
MAX_NEW_SHARE = 0.15

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
#: How GPT-2's, Qwen's and Llama's tokenizers cut text into words, and the same for ASCII, where `\\s` is the same. A
#: word of letters, which most are, is tried first where nothing else begins like one.
PATTERNS = {
    rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+": (
        r" ?[A-Za-z]+|'(?:[stmd]|re|ve|ll)| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    ),
    **{
        rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+": (
            r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\nA-Za-z0-9]?[A-Za-z]+"
            rf"|[0-9]{digits}| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
        for digits in ("", "{1,3}")
    },
}
GPT2 = next(iter(PATTERNS))


class WordCache(dict[str, list[int]]):
    """Words and their ids. `of` makes one for a tokenizer whose texts can be put together from words.

    Once it has half of the words that are remembered, these become the older half, and it begins anew: a word of the
    older half that is met is taken over, the others are forgotten with it.
    """

    def __init__(self, backend: Any, pattern: str, added: dict[str, int]) -> None:
        super().__init__()
        self._backend = backend
        self._words = re.compile(pattern, re.ASCII).findall
        self._added = {token: [number] for token, number in added.items()}  # which are no part of any word
        self._older: dict[str, list[int]] = {}
        self.update(self._added)
        # The longest first: of those that begin in one place, a tokenizer takes the longest.
        tokens = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
        self._cut = re.compile(f"({tokens})").split if added else None

    @classmethod
    def of(cls, backend: Any) -> WordCache | None:
        """The cache of a tokenizer (of the `tokenizers` library); None where its texts may be more than their words."""
        from tokenizers.models import BPE

        model, normalizer = backend.model, backend.normalizer
        if type(model) is not BPE or model.dropout or model.byte_fallback or model.fuse_unk:
            return None
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        if (normalizer is not None and _state(normalizer) != {"type": "NFC"}) or backend.truncation or backend.padding:
            return None
        pattern = PATTERNS.get(_word_pattern(backend.pre_tokenizer) or "")
        added = backend.get_added_tokens_decoder()
        if pattern is None or any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
            return None
        if len({token.normalized for token in added.values()}) > 1:
            return None  # they are looked for one kind after the other
        return cls(backend, pattern, {token.content: number for number, token in added.items() if token.content})

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text; None where the tokenizer itself must encode it."""
        if not text.isascii():
            return None
        words: list[str] = []
        if self._cut is None:
            words = self._words(text)
        else:
            for at, piece in enumerate(self._cut(text)):
                if at % 2:
                    words.append(piece)
                elif piece:
                    words += self._words(piece)
        if len(self) >= MAX_WORDS // 2 + len(self._added):
            self._older = dict(self)
            self.clear()
            self.update(self._added)
        new, older = {*words}.difference(self), self._older
        if new and older:
            met = new.intersection(older)
            self.update({word: older[word] for word in met})
            new -= met
        if new:
            many = len(new) > MAX_NEW_WORDS + MAX_NEW_SHARE * len(words)
            self._learn([*new][:MAX_NEW_WORDS] if many else [*new])
            if many:
                return None
        return list(chain.from_iterable(map(self.__getitem__, words)))

    def __missing__(self, word: str) -> list[int]:
        """A word that is not kept."""
        return self._encoded(word)

    def _learn(self, new: list[str]) -> None:
        for word in new:
            if len(word) <= MAX_WORD_CHARACTERS:
                self[word] = self._encoded(word)

    def _encoded(self, word: str) -> list[int]:
        ids: list[int] = self._backend.encode_batch_fast([word], add_special_tokens=False)[0].ids
        return ids


def _word_pattern(pre_tokenizer: Any) -> str | None:
    """The expression by which a byte-level tokenizer cuts text into words; None where it does more than that."""
    if pre_tokenizer is None:
        return None
    state = _state(pre_tokenizer)
    if state.get("type") == "ByteLevel":
        return GPT2 if state.get("use_regex") and not state.get("add_prefix_space") else None
    steps: list[dict[str, Any]] = state.get("pretokenizers", []) if state.get("type") == "Sequence" else []
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, level = steps
    if level.get("use_regex") or level.get("add_prefix_space"):
        return None
    if split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    pattern = split.get("pattern", {}).get("Regex")
    return pattern if isinstance(pattern, str) else None


def _state(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(part.__getstate__())
    return found
