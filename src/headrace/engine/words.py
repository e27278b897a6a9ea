"""A checkpoint that learns in minutes on a CPU: a two-layer Llama of width 96 with random weights, whose vocabulary is
a handful of words.

The folder is an ordinary checkpoint, served by Headrace's engine and by vLLM alike (whose CPU build needs heads of 32).
A word is a token, so that an answer can be one token, and an untrained policy still says each of them now and then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.engine import tiny

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN = "<unk>"
#: What a turn begins with.
ROLES = ("user\n", "assistant\n")

#: transformers' own spread of random weights is meant for widths of thousands: at 96, so narrow, hints would hardly be
#: seen. The head's stays small, so that no word is preferred at first.
SPREAD, HEAD_SPREAD = 0.1, 0.02

CONTEXT = 128
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    **tiny.CONFIG,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": SPREAD,
    "bos_token_id": None,
}

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def build(into: Path, words: Sequence[str], seed: int = 0) -> Path:
    """Writes the checkpoint of a policy that knows these words (letters from a to z, a digit, or a single mark),
    complete or not at all. One that exists is left as it is."""
    if not (into / "config.json").exists():
        part = into.with_name(f".{into.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _write(part, words, seed)
        part.rename(into)
    return into


def _write(into: Path, words: Sequence[str], seed: int) -> None:
    """Writes the files that transformers would; without it, since its import takes as long as everything else
    together."""
    from safetensors.numpy import save_file

    tokenizer = _tokenizer(words)
    ids = {"eos_token_id": tokenizer.token_to_id(tiny.EOS), "pad_token_id": tokenizer.token_to_id(tiny.PAD)}
    config = {**CONFIG, **ids, "vocab_size": tokenizer.get_vocab_size()}
    save_file(_weights(config, seed), into / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(into / "tokenizer.json"))
    (into / "chat_template.jinja").write_text(TEMPLATE)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tiny.EOS,
        "pad_token": tiny.PAD,
        "unk_token": UNKNOWN,
        "extra_special_tokens": [tiny.BOS],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    for name, content in {"tokenizer_config": described, "generation_config": ids, "config": config}.items():
        (into / f"{name}.json").write_text(json.dumps(content, indent=2))


def _weights(config: dict[str, Any], seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """A Llama's weights by name, each matrix normally distributed as transformers initialises it."""
    draw = np.random.default_rng(seed)
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    pairs = config["num_key_value_heads"] * config["head_dim"]

    def normal(rows: int, columns: int, spread: float = SPREAD) -> npt.NDArray[np.float32]:
        return draw.normal(0.0, spread, (rows, columns)).astype(np.float32)

    found = {"model.embed_tokens.weight": normal(vocabulary, width)}
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            **{"self_attn.q_proj": (heads, width), "self_attn.k_proj": (pairs, width)},
            **{"self_attn.v_proj": (pairs, width), "self_attn.o_proj": (width, heads)},
            **{"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)},
        }
        found |= {f"model.layers.{layer}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{norm}.weight"] = np.ones(width, np.float32)
    found["model.norm.weight"] = np.ones(width, np.float32)
    found["lm_head.weight"] = normal(vocabulary, width, HEAD_SPREAD)
    return found


def _tokenizer(known: Sequence[str]) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    special = [tiny.PAD, tiny.BOS, tiny.EOS, UNKNOWN]
    words = [*special, "\n", *ROLES, *known]
    found = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=UNKNOWN))
    pattern = "|".join(ROLES) + "|[0-9]|[a-z]+|\n|."
    found.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    found.decoder = decoders.Fuse()
    found.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    return found
