"""The weights of one version on their way to the servers (`WeightDelivery`), and the tokens with known log-probs that
show whether a server has them (`Probe`).

The weights are copied out of the trainer once, before anything is paused, for all servers. `lm_head.weight` is always
named, tied or not: a server that holds it apart would keep the old one. Files of earlier versions are deleted once
newer ones are loaded.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.data.errors import InvalidInput
from headrace.trainer.sync.http import ServerFailed


@dataclass(frozen=True)
class Gap:
    """The difference between a server's log-probs and the trainer's."""

    largest: float
    mean: float

    def within(self, allowed: Gap) -> bool:
        return self.largest <= allowed.largest and self.mean <= allowed.mean


#: What a precision alone explains, the finest first. In float32 two implementations differ by some 1e-6, and 1e-3
#: leaves room for other hardware: in `tiny`, one matrix that is 1 % off is found, one that is 0.01 % off (a gap of
#: 2e-5) is not. In bfloat16 a logit of 16 to 32 is rounded by up to 1/16, and what the layers before rounded comes on
#: top. Rounding all that SmolLM2-135M computes to bfloat16 moved the log-probs of 512 tokens by up to 0.28 and by
#: 0.035 in the mean (float16: 0.026 and 0.005); two sides that both round may be further apart, hence some three times
#: that. So a probe finds weights that are wrong, not ones that are a small step old.
TOLERANCE = {"float32": Gap(1e-3, 1e-3), "float16": Gap(0.1, 0.015), "bfloat16": Gap(0.8, 0.1)}


@dataclass(frozen=True)
class Probe:
    """Tokens, and what the trainer's own forward pass says of them: a server with the same weights agrees.

    `log_probs[i]` is that of `ids[i + 1]` at temperature 1, under the very weights that are published.

    `dtype` is what the trainer computed them in, where that is not what the weights are in: `bfloat16` under autocast.
    """

    ids: Sequence[int]
    log_probs: Sequence[float]
    dtype: str | None = None

    def __post_init__(self) -> None:
        if len(self.ids) < 2 or len(self.log_probs) != len(self.ids) - 1:
            raise InvalidInput(
                f"a probe has {len(self.ids)} ids and {len(self.log_probs)} log_probs; it needs at least 2 ids, and "
                "one log-prob for each but the first"
            )
        if not all(math.isfinite(value) for value in self.log_probs):
            raise InvalidInput("a probe's log_probs are not all finite: the trainer's own weights are broken")

    def gap(self, found: Sequence[float]) -> Gap:
        """How far these log-probs of the probe's tokens are off; infinite where one is not finite. Raises
        `ServerFailed` where there is not one for each token."""
        if len(found) != len(self.log_probs):
            raise ServerFailed(f"it scored {len(found)} tokens of the {len(self.log_probs)} of the probe")
        gaps = [abs(one - other) for one, other in zip(found, self.log_probs, strict=True)]
        if not all(math.isfinite(gap) for gap in gaps):
            return Gap(math.inf, math.inf)
        return Gap(max(gaps), sum(gaps) / len(gaps))


def tolerance(*dtypes: str | None) -> Gap:
    """The gap that the coarsest of these precisions explains; float32's where none is known."""
    known = [allowed for dtype, allowed in TOLERANCE.items() if dtype in dtypes]
    return known[-1] if known else TOLERANCE["float32"]


if TYPE_CHECKING:
    import torch

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: A folder that this module made.
WEIGHT_FOLDER = re.compile(r"weights-\d+-[0-9a-f]{32}")
NO_FOLDER = "sync.folder is not set; weights that travel by files need one that every server can read"
SHARED_MEMORY = Path("/dev/shm")


class WeightDelivery:
    """Weights as a block of shared memory, a folder of safetensors, or both; `close` once every server has answered."""

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
        """Frees the shared memory, and deletes the folders of earlier versions."""
        if self.block is not None:
            self.block.close()
            self.block.unlink()
            self.block = None
        if self.folder is not None:
            for other in self.folder.parent.iterdir():
                if WEIGHT_FOLDER.fullmatch(other.name) and other != self.folder:
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
    """The dtype of the weights; the coarsest where there are several."""
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()}
    for name in ("bfloat16", "float16", "float32"):
        if name in names and names <= {"bfloat16", "float16", "float32"}:
            return name
    raise InvalidInput(f"weights are {', '.join(sorted(names)) or 'none'}; they must be float32, float16 or bfloat16")
