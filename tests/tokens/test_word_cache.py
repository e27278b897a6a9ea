"""Texts put together from words are what the tokenizer itself makes of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from headrace.tokens import word_cache
from headrace.tokens.word_cache import GPT2, PATTERNS, WordCache

CORPUS = ["don't we'll They'RE the  river\n\n\tmill 12 345 <wheel> stones; gate()\r\n", "the the river river mill"] * 3
ADDED = ("<|end|>", "<|end|><|end|>", "<call>", "end")
#: Pieces in which the patterns' branches meet: quotes, digits, white space of every kind, controls, added tokens.
pieces = st.one_of(
    st.text("aZ9 '\n\r\t\x0b\x0c\x1c\x00.<|>_", max_size=8),
    st.sampled_from([*ADDED, "'s", "'LL", "don't", "  the river", "\n\n x", "<|end|", "1234567"]),
    st.text(st.characters(codec="ascii"), max_size=8),
)
texts = st.lists(pieces, max_size=12).map("".join)


def tokenizer(pattern: str = GPT2, *, added: tuple[AddedToken, ...] = ()) -> Any:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern == GPT2)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = level if pattern == GPT2 else pre_tokenizers.Sequence([split, level])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    )
    found.add_tokens([*added, *(AddedToken(token, normalized=False) for token in ADDED)])
    return found


BACKENDS = {pattern: tokenizer(pattern) for pattern in PATTERNS}


def own(backend: Any, text: str) -> list[int]:
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def cached(backend: Any) -> WordCache:
    found = WordCache.of(backend)
    assert found is not None
    return found


@pytest.mark.parametrize("pattern", PATTERNS, ids=["gpt2", "qwen", "llama"])
@given(said=st.lists(texts, min_size=1, max_size=6))
def test_a_text_has_the_tokenizers_own_ids(pattern: str, said: list[str]) -> None:
    backend = BACKENDS[pattern]
    words = cached(backend)
    for text in [*said, *said]:
        found = words.encode(text)
        assert found is None or found == own(backend, text)


def test_words_are_learned_once_and_then_known(monkeypatch: pytest.MonkeyPatch) -> None:
    words = cached(BACKENDS[GPT2])
    text = "the river, the mill<call> and the gate" * 3
    assert words.encode(text) == own(BACKENDS[GPT2], text)

    def never(self: WordCache, word: str) -> list[int]:
        raise AssertionError(f"{word!r} was known")

    monkeypatch.setattr(WordCache, "_encoded", never)
    assert words.encode(text) == own(BACKENDS[GPT2], text)


def test_a_text_of_many_new_words_is_left_to_the_tokenizer_until_they_are_known() -> None:
    words = cached(BACKENDS[GPT2])
    text = " ".join(f"w{chr(97 + n // 26)}{chr(97 + n % 26)}x" for n in range(200))
    tries = 1
    while (found := words.encode(text)) is None:
        tries += 1
    assert found == own(BACKENDS[GPT2], text)
    assert 2 < tries <= 200 // word_cache.MAX_NEW_WORDS + 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "MAX_WORDS", 20)
    backend, words = BACKENDS[GPT2], cached(BACKENDS[GPT2])
    for n in range(100):
        text = f"a{'bc' * n} d{'e' * n} <call>{'x' * 100}"
        assert words.encode(text) in (None, own(backend, text))
        assert len(words) <= 20 // 2 + 4 + 4
        assert all(len(word) <= word_cache.MAX_WORD_CHARACTERS for word in words)


def test_words_that_are_used_stay_whatever_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "MAX_WORDS", 20)
    words = cached(BACKENDS[GPT2])
    learned: list[str] = []

    def encoded(self: WordCache, word: str) -> list[int]:
        learned.append(word)
        return own(BACKENDS[GPT2], word)

    monkeypatch.setattr(WordCache, "_encoded", encoded)
    for n in range(100):
        assert words.encode(f"the river {'x' * (n + 1)}") is not None
    assert [learned.count(word) for word in ("the", " river", " xx")] == [1, 1, 1]
    assert words.encode("xx") is not None, "without a space it is another word"
    assert words.encode("the xx") is not None
    assert learned.count(" xx") == 2, "a word that nobody said for long is forgotten"


def test_what_is_no_ascii_is_left_to_the_tokenizer() -> None:
    assert cached(BACKENDS[GPT2]).encode("größer") is None


def changed(part: str, value: Any) -> Any:
    found = tokenizer()
    setattr(found, part, value)
    return found


@pytest.mark.parametrize(
    "backend",
    [
        changed("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        changed("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])),
        changed("pre_tokenizer", None),
        changed("normalizer", normalizers.Lowercase()),
        tokenizer(added=(AddedToken("<pad>", lstrip=True, normalized=False),)),
        tokenizer(added=(AddedToken("<pad>", normalized=True),)),
    ],
    ids=["a space in front", "digits first", "no words", "lower case", "a token that takes space", "two kinds"],
)
def test_a_tokenizer_that_does_more_than_words_is_left_alone(backend: Any) -> None:
    assert WordCache.of(backend) is None


def test_a_normalizer_that_leaves_ascii_alone_is_no_hindrance() -> None:
    backend = changed("normalizer", normalizers.NFC())
    assert cached(backend).encode("the river don't") == own(backend, "the river don't")
