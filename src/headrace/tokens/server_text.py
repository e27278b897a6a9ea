"""What a rollout server says for ids: vLLM's detokenizers, step by step.

A server decodes each id as it comes, behind its prompt. Its text is that of all ids at once, but for odd runs of bytes,
added tokens beside each other, and the end: what might still have become a character is never said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from headrace.tokens.decoding import REPLACEMENT_CHARACTER, ContinuedText, PromptIds, prompt_tail
from headrace.tokens.vocabulary import Vocabulary

#: Ids of the prompt that vLLM's detokenizer in Python looks at, and how many of those that are shown it decodes.
SLOW_TAIL_TOKENS, SLOW_CONTEXT_TOKENS = 7, 5


def server_pieces(vocabulary: Vocabulary, ids: Sequence[int], prompt: PromptIds) -> Iterator[Iterator[str]]:
    """The ways in which a server may say an answer, each as pieces that add up to it: special tokens shown or not,
    with and without spaces between added ones (`spaces_between_special_tokens`), and by its detokenizer in Python."""
    for skip in (False, True):
        yield _pieces(vocabulary, ids, prompt, skip)
        if not skip and vocabulary.added:
            yield _without_spaces(vocabulary, ids, prompt)
        yield _slow_pieces(vocabulary, ids, prompt, skip)


def _pieces(vocabulary: Vocabulary, ids: Sequence[int], prompt: PromptIds, skip: bool) -> Iterator[str]:
    decode = partial(vocabulary.decode, skip_special=skip)
    stream = ContinuedText(decode, prompt_tail(decode, prompt))
    return map(stream.add, ids)


def _without_spaces(vocabulary: Vocabulary, ids: Sequence[int], prompt: PromptIds) -> Iterator[str]:
    added_before = False
    for token, piece in zip(ids, _pieces(vocabulary, ids, prompt, False), strict=True):
        added = vocabulary.added.get(token)
        yield added if added is not None and added_before else piece
        added_before = added is not None


def _slow_pieces(vocabulary: Vocabulary, ids: Sequence[int], prompt: PromptIds, skip: bool) -> Iterator[str]:
    def shown(tokens: PromptIds) -> list[int]:
        return [int(token) for token in tokens if not skip or int(token) not in vocabulary.special]

    known = shown(prompt[-SLOW_TAIL_TOKENS:])
    first, read = max(len(known) - SLOW_CONTEXT_TOKENS, 0), len(known)
    for token in ids:
        known += shown([token])
        before, now = vocabulary.decode(known[first:read]), vocabulary.decode(known[first:])
        if len(now) <= len(before) or now.endswith(REPLACEMENT_CHARACTER):
            continue
        yield now[len(before) :]
        first, read = read, len(known)
