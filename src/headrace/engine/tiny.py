"""`tiny`: a two-layer Llama of width 96 with random weights, its tokenizer and a chat template, built on the spot.

The folder is an ordinary checkpoint (`config.json`, `model.safetensors`, `tokenizer.json`, ...) that transformers and
vLLM load as well; on a CPU, vLLM wants a `head_dim` of 32. The same recipe and seed give the same folder, so it is
built once and found again. The embeddings are not tied: a server that reloads weights in place then cannot keep an old
half of them.

The template is prefix-preserving: every message is rendered by itself and nothing of a turn depends on a later one, so
the ids of a longer conversation begin with those of a shorter one. Tools stand in the first turn.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace.files import cache_folder

BOS, EOS, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
#: Tokens of their own that are text all the same: a parser must see them.
MARKS = ("<tool_call>", "</tool_call>")
VOCABULARY = 384
CONTEXT = 2048

CONFIG: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\nCall a tool with <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and tools and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- endif %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{%- set function = call.function if call.function is defined else call %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
{{- function.arguments if function.arguments is string else (function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

#: What the merges are learned from: the words of a chat, of tools and of small games, the commonest most often.
CORPUS = (
    *["system\n", "user\n", "assistant\n", "tool\n"] * 40,
    *['{"name": "', '", "arguments": {"', '"}}', '{"type": "function", "function": {'] * 12,
    *[" higher", " lower", " guess", " correct", " number", " the", " a number from", " to", " is", " it"] * 8,
    *["higher", "lower", "guess", "correct", "number", " Guess", " you", " and", " of", " in", " answer", " yes", " no"]
    * 5,
    *["the", "and", "ing", "ion", "er", "re", "th", "an", "on", "en", "at", "or", "es", "st", "ar", "it", "le"] * 3,
)


def folder(seed: int = 0) -> Path:
    """The folder of `tiny` with this seed, found or built in the user's cache, or in a temporary folder where that
    cannot be written."""
    found = _place(seed)
    if not is_built(seed):
        made = Path(tempfile.mkdtemp(prefix=f"{found.name}-", dir=found.parent))
        build(made, seed)
        try:
            made.rename(found)
        except OSError:  # another process was first
            shutil.rmtree(made)
    return found


def is_built(seed: int) -> bool:
    """Whether `folder` has only to find it."""
    return (_place(seed) / "config.json").exists()


def _place(seed: int) -> Path:
    """Where `tiny` with this seed is, or is to be built."""
    recipe = json.dumps([CONFIG, TEMPLATE, CORPUS, VOCABULARY, version("transformers"), seed])
    name = f"tiny-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    home = cache_folder()
    try:
        home.mkdir(parents=True, exist_ok=True)
        home = home if os.access(home, os.W_OK) else Path(tempfile.gettempdir())
    except OSError:
        home = Path(tempfile.gettempdir())
    return home / name


def build(into: Path, seed: int = 0, **config: Any) -> None:
    """Writes the checkpoint into an empty folder; `config` overrides fields of its configuration."""
    write(into, _tokenizer(), {**CONFIG, **config}, seed)


def write(into: Path, tokenizer: Any, config: dict[str, Any], seed: int) -> None:
    """Writes a Llama with random weights for a tokenizer's vocabulary."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{"vocab_size": len(tokenizer), **ids, **config}))
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(into)
    tokenizer.save_pretrained(into)


def _tokenizer() -> Any:
    """A byte-level BPE in which each digit is a token."""
    from tokenizers import pre_tokenizers

    bytes_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_level])
    return bpe_tokenizer(CORPUS, VOCABULARY - len(MARKS), pre_tokenizer, model_max_length=CONTEXT)


def bpe_tokenizer(corpus: Iterable[str], vocabulary: int, pre_tokenizer: Any, **options: Any) -> Any:
    """A byte-level BPE with merges learned from a corpus, the marks of tool calls and `TEMPLATE`: every text can be
    encoded. `options` are those of transformers' `PreTrainedTokenizerFast`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizer
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(corpus, trainer)
    inner.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[BOS],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        **options,
    )
