"""The text of an answer is what it adds to its prompt's, with every kind of decoder, however its ids arrive."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tokens.models import SENTENCEPIECE, vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.engine.sequence import OutputText
from headrace.tokens import Detokenizer, Vocabulary, same_text, text_of
from headrace.tokens.decoding import prompt_tail, token_text, whole_characters
from headrace.tokens.server_text import server_pieces

#: What vLLM 0.32 said, by `tests/vllm/record_texts.py`.
RECORDED = Path(__file__).with_name("vllm_texts.json")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁the", "▁cat", "s", ".", "日", "▁a", "\n"]
MARKS = ["<s>", "</s>", "<|user|>"]
PIECES = [*MARKS, *WORDS, *BYTES]
FIRST_BYTE = len(MARKS) + len(WORDS)


def _sentencepiece(strip: bool, prepend: bool) -> Tokenizer:
    """A BPE with byte fall-back, as Llama 2 has it (`strip`, `prepend`), or Gemma (neither)."""
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    made = Tokenizer(models.BPE(vocab, [], unk_token=None, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prepend else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return made


def _metaspace() -> Tokenizer:
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def _words(decoder: Any) -> Tokenizer:
    """Whole words and parts of them, as many as the other kinds have tokens."""
    words = [*MARKS, "the", "##s", "cat", ".", "##ing</w>", "don", "'", "t", *(f"w{n}</w>" for n in range(257))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="the"))
    if decoder is not None:
        made.decoder = decoder
    return made


def _byte_level() -> Tokenizer:
    pieces = [
        *MARKS,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "Ġt",
        "he",
        "Ġthe",
        "æĹ",
        "ðŁ",
        "Ġæ",
        "xx",
        "yy",
        "zz",
    ]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


KINDS = {
    "llama": lambda: _sentencepiece(strip=True, prepend=True),
    "internlm": lambda: _sentencepiece(strip=True, prepend=False),
    "gemma": lambda: _sentencepiece(strip=False, prepend=False),
    "metaspace": _metaspace,
    "wordpiece": lambda: _words(decoders.WordPiece()),
    "suffixes": lambda: _words(decoders.BPEDecoder()),
    "none": lambda: _words(None),
    "bytes": _byte_level,
}
SIZE = 268  # ids that every one of them has

IDS = st.lists(st.integers(0, SIZE - 1), max_size=14)
#: Mostly bytes, so that characters become whole, break, and are spoilt.
BYTE_RUNS = st.lists(st.sampled_from("日🙂é aÿ".encode() + b"\xff\xe6\x97"), max_size=10).map(
    lambda found: [FIRST_BYTE + byte for byte in found]
)


@cache
def made(kind: str) -> Vocabulary:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    return Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def by_the_library(vocab: Vocabulary, ids: list[int], prompt: list[int], *, skip: bool = False) -> str:
    """What vLLM's detokenizer says: `DecodeStream` over all the prompt, begun anew where it fails."""
    backend, said = vocab.hf.backend_tokenizer, ""
    stream = decoders.DecodeStream(ids=prompt, skip_special_tokens=skip)
    for token in ids:
        try:
            piece = stream.step(backend, token)
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            stream = decoders.DecodeStream(skip_special_tokens=skip)
            piece = stream.step(backend, token)
        said += piece or ""
    return said


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(prompt=IDS, ids=IDS, runs=BYTE_RUNS, data=st.data())
def test_pieces_add_up_however_an_answer_is_cut(
    kind: str, prompt: list[int], ids: list[int], runs: list[int], data: st.DataObject
) -> None:
    vocab, ids = made(kind), [*ids, *runs]
    stream, at, said = Detokenizer(vocab, prompt=prompt), 0, ""
    while at < len(ids):
        size = data.draw(st.integers(1, 4))
        said += stream.feed(ids[at : at + size])
        at += size
    assert said + stream.finish() == text_of(vocab, ids, prompt=prompt)
    assert text_of(vocab, ids, keep=vocab.special, prompt=prompt) == vocab.decode_after(prompt, ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(prompt=IDS, ids=IDS, runs=BYTE_RUNS, skip=st.booleans())
def test_an_answer_is_decoded_as_a_server_does_and_passes_the_check(
    kind: str, prompt: list[int], ids: list[int], runs: list[int], skip: bool
) -> None:
    vocab, ids = made(kind), [*ids, *runs, *ids[:2]]
    said = by_the_library(vocab, ids, prompt, skip=skip)
    assert said in {"".join(pieces) for pieces in server_pieces(vocab, ids, prompt)}
    assert same_text(vocab, ids, said, prompt=prompt)
    if not vocab.bytewise and whole_characters(partial(vocab.decode, skip_special=skip), prompt) == prompt:
        assert skip or vocab.decode_after(prompt, ids).startswith(said)
        engine = OutputText(vocab.hf.backend_tokenizer, prompt, skip_special_tokens=skip)
        engine.take(ids)
        assert engine.value == said


@pytest.mark.parametrize("kind", ["llama", "internlm", "metaspace"])
def test_the_first_word_of_an_answer_has_its_space(kind: str) -> None:
    vocab = made(kind)
    ids = [PIECES.index("▁the"), PIECES.index("▁cat"), PIECES.index("s")]
    prompt = [0, *ids, 2]
    assert text_of(vocab, ids) == "the cats"
    assert text_of(vocab, ids, prompt=prompt) == " the cats"
    assert same_text(vocab, ids, " the cats", prompt=prompt)
    assert same_text(vocab, ids, "the cats", prompt=prompt)  # by a server that decodes the answer alone
    assert same_text(vocab, ids, " the", [" cat"], prompt=prompt)
    for other in ("  the cats", " the cat", "the", " the dogs", ""):
        assert not same_text(vocab, ids, other, prompt=prompt), other


def test_what_never_becomes_a_character_is_shown_at_the_end() -> None:
    vocab = made("llama")
    the, prompt = PIECES.index("▁the"), [0, PIECES.index("▁cat")]
    half = [the, FIRST_BYTE + 0xE6, FIRST_BYTE + 0x97]
    stream = Detokenizer(vocab, prompt=prompt)
    assert [stream.feed([token]) for token in half] == [" the", "", ""]
    assert stream.finish() == "\ufffd\ufffd"
    assert same_text(vocab, half, " the", prompt=prompt)
    # Byte fall-back decodes a run of bytes as a whole: one that is wrong spoils a character that was said already.
    spoilt = [*(FIRST_BYTE + byte for byte in "日".encode()), FIRST_BYTE + 0xFF]
    assert text_of(vocab, spoilt, prompt=prompt) == "日\ufffd"
    assert text_of(vocab, [*spoilt, the, the], prompt=prompt) == "日the the"


def test_a_prompt_that_ends_inside_a_character() -> None:
    """Its text is not the answer's; vLLM says it all the same, which is no reason to throw the answer away."""
    for kind in ("llama", "bytes"):
        vocab = made(kind)
        begun, rest = ([vocab.id_of(token) for token in tokens] for tokens in _halves(kind))
        prompt = [0, *begun]  # type: ignore[list-item]
        said = by_the_library(vocab, rest, prompt)  # type: ignore[arg-type]
        assert said == "<s>日", kind
        assert same_text(vocab, rest, said, prompt=prompt)  # type: ignore[arg-type]
        assert text_of(vocab, rest, prompt=prompt) == "\ufffd"  # type: ignore[arg-type]


def _halves(kind: str) -> tuple[list[str], list[str]]:
    if kind == "llama":
        return ["<0xE6>", "<0x97>"], ["<0xA5>"]
    return ["æĹ"], ["¥"]


def test_a_token_that_ends_inside_a_character_is_held_back_whole() -> None:
    vocab = made("bytes")
    ids = [vocab.id_of("Ġthe"), vocab.id_of("Ġæ")]
    assert by_the_library(vocab, ids, [0]) == " the"  # type: ignore[arg-type]
    assert same_text(vocab, ids, " the", prompt=[0])  # type: ignore[arg-type]


def test_a_long_run_of_bytes_before_an_answer() -> None:
    vocab = made("llama")
    prompt = [0, *(FIRST_BYTE + byte for byte in ("日" * 9 + "é").encode())]
    the = PIECES.index("▁the")
    for tail in (prompt, prompt[-18:], prompt[-17:]):
        assert by_the_library(vocab, [the], prompt) == text_of(vocab, [the], prompt=tail) == " the"
    assert len(prompt_tail(vocab.decode, [the] * 99)) < 20


def test_a_text_that_goes_on_gets_no_space() -> None:
    for kind in ("llama", "metaspace", "gemma", "bytes"):
        vocab = made(kind)
        for text in ("s.", " s.", "") if kind == "metaspace" else ("s.", " the cat", "\nthe", ""):
            ids = vocab.encode_after(text)
            before = [PIECES.index("▁cat")] if kind != "bytes" else vocab.encode(" cat")
            assert vocab.decode_after(before, ids) == text, (kind, text, ids)


def test_a_token_alone_keeps_its_space_where_a_server_shows_it() -> None:
    vocab = made("metaspace")
    assert vocab.token_text(PIECES.index("▁the")) == " the"
    assert vocab.token_text(PIECES.index("s")) == "s"
    assert token_text(vocab.hf.backend_tokenizer, None, PIECES.index("▁the")) == "the"


@pytest.mark.parametrize("name", SENTENCEPIECE)
@settings(max_examples=40)
@given(
    texts=st.lists(st.text("ab the.日🙂é\n<>", min_size=1, max_size=12), min_size=2, max_size=2),
    ids=st.lists(st.integers(0, 31999), max_size=12),
)
def test_real_vocabularies_are_decoded_as_a_server_does(name: str, texts: list[str], ids: list[int]) -> None:
    vocab = vocabulary(name)
    prompt = vocab.encode_prompt(texts[0])
    for answer in (vocab.encode_after(texts[1]), ids):
        said = by_the_library(vocab, answer, prompt)
        assert vocab.decode_after(prompt, answer).startswith(said)
        assert same_text(vocab, answer, said, prompt=prompt)
    assert vocab.decode_after(prompt, vocab.encode_after(texts[1])) == texts[1]


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_the_check_agrees_with_what_vllm_said(name: str) -> None:
    vocab = vocabulary(name)
    for prompt, ids, texts in json.loads(RECORDED.read_text())[name]:
        assert [same_text(vocab, ids, text, prompt=prompt) for text in texts] == [True] * len(texts), (prompt, ids)
