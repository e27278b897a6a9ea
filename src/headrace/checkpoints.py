"""Where a model lies: a folder on this machine, or a name on Hugging Face's hub, as transformers takes both."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.data.errors import InvalidInput

#: What a name on the hub can be: `name` or `owner/name`. Anything else is a path.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w-][\w.-]*)?")
#: The files of a model that are fetched: weights as safetensors, configuration, tokenizer and chat template.
FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def local_folder(model: str | Path) -> Path | None:
    """The folder that a model's path names; None where there is none and it can be a name on the hub. `InvalidInput`
    where it can be neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise InvalidInput(f"{path.absolute()} is a file; a model is a folder, with a config.json")
    if not HUB_NAME.fullmatch(str(model)):
        raise InvalidInput(f"there is no folder {path.absolute()}")
    return None


def checkpoint_folder(model: str | Path) -> Path:
    """The folder of a model; one that only the hub has is fetched into the hub's cache, or found there. `InvalidInput`
    where it is nowhere."""
    found = local_folder(model)
    if found is not None:
        return found
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=list(FETCHED)))
    except (OSError, ValueError) as error:
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InvalidInput(
            f"there is no folder {Path(model).absolute()}, and no model {model} could be fetched from the hub: {why}"
        ) from error
