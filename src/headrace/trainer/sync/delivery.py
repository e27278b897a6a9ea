"""One version's weights on their way: copied out of the trainer once, before anything is paused, for all servers.

`lm_head.weight` is always named, tied or not: a server that holds it apart would keep the old one. Files of earlier
versions are deleted once newer ones are loaded.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.data.errors import InvalidInput

if TYPE_CHECKING:
    import torch

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: A folder that this module made.
MADE = re.compile(r"weights-\d+-[0-9a-f]{32}")
NO_FOLDER = "sync.folder is not set; weights that travel by files need one that every server can read"
SHARED_MEMORY = Path("/dev/shm")


class Delivery:
    """A block of shared memory, a folder of safetensors, or both; `close` once every server has answered."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], version: int, *, shared: bool, files: bool, folder: Path | None
    ) -> None:
        self.version = version
        self.dtype = _dtype(weights)
        self.block: Any = None
        self.manifest: list[dict[str, Any]] = []
        self.folder: Path | None = None
        named = {name: tensor.detach() for name, tensor in weights.items()}
        if HEAD not in named and EMBED in named:
            named[HEAD] = named[EMBED]
        try:
            if shared:
                self._share(named)
            if files:
                self._write(named, folder)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.block is not None:
            self.block.close()
            self.block.unlink()
            self.block = None
        if self.folder is not None:
            for other in self.folder.parent.iterdir():
                if MADE.fullmatch(other.name) and other != self.folder:
                    shutil.rmtree(other, ignore_errors=True)

    def _share(self, tensors: Mapping[str, torch.Tensor]) -> None:
        from headrace.engine.weights import share

        size = sum(tensor.numel() * tensor.element_size() + 64 for tensor in tensors.values())
        if SHARED_MEMORY.is_dir():  # writing past its end would not be an error but the end of this process
            disk = os.statvfs(SHARED_MEMORY)
            if size > disk.f_bavail * disk.f_frsize:
                raise InvalidInput(
                    f"{SHARED_MEMORY} has {disk.f_bavail * disk.f_frsize} bytes free and the weights take {size}; "
                    "set sync.via to files"
                )
        self.block, self.manifest = share(tensors)

    def _write(self, tensors: Mapping[str, torch.Tensor], folder: Path | None) -> None:
        from safetensors.torch import save_file

        if folder is None:
            raise InvalidInput(NO_FOLDER)
        # Tied tensors are one in memory, which a file does not know.
        apart: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in tensors.items():
            held = tensor.cpu().contiguous()
            apart[name] = held.clone() if held.data_ptr() in seen else held
            seen.add(held.data_ptr())
        made = folder.resolve() / f"weights-{self.version}-{uuid.uuid4().hex}"
        made.mkdir(parents=True)
        save_file(apart, made / "model.safetensors", {"format": "pt"})
        self.folder = made


def _dtype(weights: Mapping[str, torch.Tensor]) -> str:
    """What the weights are; the coarsest where they are several."""
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
    for name in ("bfloat16", "float16", "float32"):
        if name in names and names <= {"bfloat16", "float16", "float32"}:
            return name
    raise InvalidInput(f"weights are {', '.join(sorted(names)) or 'none'}; they must be float32, float16 or bfloat16")
