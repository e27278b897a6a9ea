"""A tokenizer that needs no network: byte-level BPE with a token for each common word, and a chat template with tools.

The merges are learned on the spot from the text that agents speak, so a word is a token, as it is for the commonest
words in a tokenizer of 150,000. The same text gives the same tokenizer. The template is the engine's `tiny`'s.
"""

from __future__ import annotations

from pathlib import Path

from headrace.bench.gateway.text import SOURCE, WORDS
from headrace.engine.tiny import BOS, EOS, MARKS, PAD, TEMPLATE

#: More merges than the words need: learning ends when every word is whole.
VOCABULARY = 4096
#: Numbers and letters of chat and JSON, so that they too are more than bytes.
OTHERS = ("system", "user", "assistant", "tool", "function", "name", "arguments", "description", "helpful")


def build(into: Path) -> None:
    """Writes the tokenizer's files into a folder, which `--tokenizer-path` takes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    spoken = [" ".join([word, word]) for word in sorted({*WORDS, *OTHERS})]
    inner.train_from_iterator([SOURCE, *spoken, *spoken], trainer)
    inner.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[BOS],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(into)
