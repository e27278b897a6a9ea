"""Where a model comes from: a checkpoint's folder, or a name on the hub that transformers takes its models from."""

from __future__ import annotations

from pathlib import Path

from headrace.checkpoints import HUB_NAME
from headrace.data.errors import InvalidInput

WAYS = "give the folder of a checkpoint (config.json, *.safetensors), or a hub name such as Qwen/Qwen3-0.6B"


def check(model: Path) -> None:
    """Raises `InvalidInput` where a model is neither a folder with a checkpoint nor what could be a hub name."""
    if (model / "config.json").is_file():
        return
    if model.is_dir():
        raise InvalidInput(f"model {model}: the folder {model.absolute()} has no config.json; {WAYS}")
    if model.exists():
        raise InvalidInput(f"model {model} is a file; {WAYS}")
    if not HUB_NAME.fullmatch(str(model)):
        raise InvalidInput(f"model {model}: there is no folder {model.absolute()}; {WAYS}")


def not_loaded(model: Path, error: Exception) -> InvalidInput:
    """What to say where transformers could not load a model that `check` let pass."""
    if model.is_dir():
        return InvalidInput(f"model {model} cannot be loaded: {error}")
    why = str(error).strip().splitlines()
    return InvalidInput(
        f"model {model}: there is no folder {model.absolute()}, and as a hub name it cannot be loaded: "
        f"{why[0] if why else type(error).__name__}; {WAYS}"
    )
