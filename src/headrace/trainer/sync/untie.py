"""Makes a copy of a checkpoint whose `lm_head` is a tensor of its own, as vLLM must serve it to have its weights
replaced.

`python -m headrace.trainer.sync.untie FROM INTO`
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from headrace.data.errors import HeadraceError, InvalidInput
from headrace.trainer.sync.servers import ties
from headrace.trainer.sync.weights import EMBED, HEAD

#: Files that hold tensors, or say which file holds which.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth")


def untie(folder: Path, into: Path) -> None:
    """Copies a checkpoint, with `lm_head.weight` written out and `tie_word_embeddings` false. Raises `InvalidInput`
    where `folder` ties nothing or `into` is not empty."""
    from safetensors.torch import save_file

    from headrace.engine.weights import checkpoint

    tied = ties(folder)
    if tied is None:
        raise InvalidInput(f"{folder} is no checkpoint: it has no config.json that can be read")
    if not tied:
        raise InvalidInput(f"{folder} does not tie its embeddings; it can be served as it is")
    if into.exists() and any(into.iterdir()):
        raise InvalidInput(f"{into} is not empty; name a folder that is, or that does not exist yet")
    tensors = checkpoint(folder)
    if EMBED not in tensors:
        raise InvalidInput(f"{folder} has no {EMBED}; its model is of a family that is not known here")
    tensors[HEAD] = tensors[EMBED].clone()
    shutil.copytree(folder, into, ignore=shutil.ignore_patterns(*WEIGHTS), dirs_exist_ok=True)
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    config["tie_word_embeddings"] = False
    (into / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("usage: python -m headrace.trainer.sync.untie FROM INTO")
    try:
        untie(Path(sys.argv[1]), Path(sys.argv[2]))
    except HeadraceError as error:
        sys.exit(str(error))
    print(f"{sys.argv[2]} has lm_head.weight of its own: serve it in place of {sys.argv[1]}")


if __name__ == "__main__":
    main()
