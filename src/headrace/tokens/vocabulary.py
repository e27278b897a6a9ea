"""The tokenizer as the rest of this package sees it: text to ids, ids to text and to bytes, exactly.

Nothing here adds or cleans up: no begin-of-text that nobody asked for, no spaces removed before a full stop. Ids that
arrive one by one become text of which nothing is taken back: the pieces add up to the text of all the ids, however they
were cut, and no character is given out half. The ids of an answer are decoded as what follows their prompt.
"""

from __future__ import annotations

import codecs
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from headrace.data.errors import InvalidInput
from headrace.files import local_model_folder
from headrace.tokens.decoding import ContinuedText, PromptIds, prompt_tail, space_marker, token_text, whole_characters
from headrace.tokens.word_cache import WordCache


class Vocabulary:
    """A tokenizer with exact round trips. `hf` is the transformers tokenizer that template code needs."""

    def __init__(self, hf: Any) -> None:
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise InvalidInput(f"{type(hf).__name__} is no fast tokenizer; save it with a tokenizer.json")
        self.hf = hf
        self.folder = str(getattr(hf, "name_or_path", "") or "")
        self._backend = backend
        added = {int(i): token for i, token in backend.get_added_tokens_decoder().items()}
        self.added = {i: str(token.content) for i, token in added.items()}
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.size = int(backend.get_vocab_size(with_added_tokens=True))
        self.bytewise = type(backend.decoder).__name__ == "ByteLevel"
        self._bytes = _Bytes(self._bytes_of)
        self._words = WordCache.of(backend)

    @property
    def remembers_words(self) -> bool:
        """Whether texts are put together from words that it knows."""
        return self._words is not None

    @cached_property
    def longest(self) -> int | None:
        """Characters that a token holds at most, so that a text's length bounds its tokens from below; None where a
        tokenizer may leave characters out."""
        if not self.bytewise or self._backend.normalizer is not None:
            return None
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with nothing put around it."""
        if self._words is not None:
            known = self._words.encode(text)
            if known is not None:
                return known
        # A batch of one: unlike a single text, it lets other threads run meanwhile. `fast` leaves out offsets.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def encode_after(self, text: str) -> list[int]:
        """The ids of a text that goes on where another ended: a SentencePiece model puts no space before it."""
        if not self.bytewise:
            for before in ("\n", "x"):
                lead, ids = self.encode(before), self.encode(before + text)
                if ids[: len(lead)] == lead:
                    return ids[len(lead) :]
        return self.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """A text prompt, with what the tokenizer puts around one (a begin-of-text, where it has that)."""
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=True)[0].ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ids; without special tokens where these are to be skipped."""
        text: str = self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)
        return text

    def decode_after(self, prompt: PromptIds, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ids that follow a prompt; without special tokens where these are to be skipped."""
        if self.bytewise:
            return self.decode(ids, skip_special=skip_special)
        text = self.text_after(prompt)
        shown = [int(i) for i in ids if not skip_special or i not in self.special]
        return "".join(map(text.add, shown)) + text.rest()

    def text_after(self, prompt: PromptIds) -> ContinuedText:
        """Decodes the ids that follow a prompt, special ones included. Of a character in which the prompt ends, what
        the prompt has is left out."""
        decode = partial(self._backend.decode, skip_special_tokens=False)
        return ContinuedText(decode, whole_characters(decode, prompt_tail(decode, prompt)))

    def token_text(self, token_id: int) -> str:
        """The text of one token, with the space that it has in a text."""
        return token_text(self._backend, self._space_marker, token_id)

    @cached_property
    def _space_marker(self) -> str | None:
        return space_marker(self._backend)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its text; None where there is no such token."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def holds(self, ids: Sequence[int]) -> bool:
        """Whether every id is one of the vocabulary's."""
        return all(0 <= i < self.size for i in ids)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """Tokens' bytes; only for byte-level vocabularies (`bytewise`)."""
        return b"".join(map(self._bytes.__getitem__, ids))

    def _bytes_of(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""  # beyond the vocabulary; the step's check names it
        try:
            return bytes(BYTE_OF[char] for char in token)
        except KeyError:  # an added token, which is text and not spelt in the byte alphabet
            return token.encode()

    def serialised(self) -> str:
        """All of the tokenizer, as its `tokenizer.json` would have it."""
        text: str = self._backend.to_str()
        return text


class _Bytes(dict[int, bytes]):
    """Each token's bytes, found out when it is first met."""

    def __init__(self, found: Callable[[int], bytes]) -> None:
        super().__init__()
        self._found = found

    def __missing__(self, token_id: int) -> bytes:
        known = self[token_id] = self._found(token_id)
        return known


#: What transformers looks for before it imports what its models need.
TORCH = ("torch", "torchvision")


def do_without_torch() -> None:
    """For a process that only tokenises, before it loads its first tokenizer: transformers would import torch for
    nothing, which takes seconds and 250 MB. Afterwards nothing in this process can import it."""
    for name in TORCH:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # not to be found
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


def import_without_models() -> None:
    """For a process that needs torch and of transformers its tokenizers and configurations alone, before it imports
    either: what transformers imports for models takes four seconds, and it does without where it finds no torch.
    Afterwards torch can be imported, and transformers has no models in this process. Where it has been imported
    before, nothing is changed."""
    if {"torch", "transformers"} & sys.modules.keys():
        return
    do_without_torch()
    try:
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401
    finally:
        for name in TORCH:
            if sys.modules.get(name, "") is None:
                del sys.modules[name]


def load_vocabulary(folder: str | Path) -> Vocabulary:
    """The tokenizer in a model's folder, or in the hub's cache by the model's name; nothing is fetched."""
    here = local_model_folder(folder)
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        if here is None:
            raise InvalidInput(
                f"no tokenizer could be loaded from {folder}: there is no folder {Path(folder).absolute()}, and the "
                "hub's cache on this machine has no model of that name"
            ) from error
        raise InvalidInput(f"no tokenizer could be loaded from {folder}: {error}") from error
    return Vocabulary(hf)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in plain}
    spare = (byte for byte in range(256) if byte not in set(plain))
    alphabet.update({chr(256 + n): byte for n, byte in enumerate(spare)})
    return alphabet


BYTE_OF = _byte_alphabet()


class Detokenizer:
    """Text of one answer to `prompt`, piece by piece. Special tokens are left out, except those in `keep`, and so are
    those in `drop`.

    A byte-level vocabulary does not look at the prompt.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        keep: frozenset[int] = frozenset(),
        drop: frozenset[int] = frozenset(),
        prompt: PromptIds = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._dropped = (vocabulary.special - keep) | drop
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = None if vocabulary.bytewise else vocabulary.text_after(prompt)

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain now."""
        kept = ids if self._dropped.isdisjoint(ids) else [i for i in ids if i not in self._dropped]
        if self._text is None:
            return self._utf8.decode(self._vocabulary.bytes_of(kept))
        return "".join(self._text.add(int(i)) for i in kept)

    def finish(self) -> str:
        """What was held back: an incomplete character at the end, as U+FFFD."""
        return self._utf8.decode(b"", final=True) if self._text is None else self._text.rest()


def text_of(
    vocabulary: Vocabulary, ids: Sequence[int], *, keep: frozenset[int] = frozenset(), prompt: PromptIds = ()
) -> str:
    """The text of ids that follow `prompt`, at once; what a `Detokenizer`'s deltas add up to."""
    stream = Detokenizer(vocabulary, keep=keep, prompt=prompt)
    return stream.feed(ids) + stream.finish()
