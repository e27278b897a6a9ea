"""The demo's policy: a two-layer Llama of width 96 with random weights, which knows the sixteen words of its games.

The folder is an ordinary checkpoint, served by Headrace's engine and by vLLM alike (whose CPU build wants heads of 32).
A word is a token, so that a guess is one call of one token, and a policy that knows nothing still guesses now and then.

    python -m headrace.demo.model FOLDER --seed 0

writes it, for a vLLM to serve.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.engine import tiny

UNKNOWN = "<unk>"
ROLES = ("user\n", "assistant\n")
WORDS = ("\n", *ROLES, "guess", "higher", "lower", "1", "2", "3", "4", "5", "6")

#: transformers' own spread of random weights is meant for widths of thousands: at 96, so narrow, hints would hardly be
#: seen. The head's stays small, so that no word is preferred at first.
SPREAD, HEAD_SPREAD = 0.1, 0.02

CONTEXT = 128
CONFIG: dict[str, Any] = {
    **tiny.CONFIG,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": SPREAD,
}

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def build(into: Path, seed: int = 0) -> Path:
    """Writes the checkpoint, whole or not at all; one that is there already stays."""
    if not (into / "config.json").exists():
        part = into.with_name(f".{into.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        tiny.write(part, _tokenizer(), CONFIG, seed, head_scale=HEAD_SPREAD / SPREAD)
        part.rename(into)
    return into


def _tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [tiny.PAD, tiny.BOS, tiny.EOS, UNKNOWN, *WORDS]
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=UNKNOWN))
    pattern = "|".join(ROLES) + "|[0-9]|[a-z]+|\n|."
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=tiny.EOS,
        pad_token=tiny.PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[tiny.BOS],
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m headrace.demo.model", description="Writes the demo's checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(args)
    print(build(given.folder, given.seed))


if __name__ == "__main__":
    main()
