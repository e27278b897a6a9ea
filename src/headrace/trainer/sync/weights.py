"""The weights of one version on their way to the servers (`WeightDelivery`), and the tokens with known log-probs that
show whether a server has them (`Probe`).

The weights are copied out of the trainer once, before anything is paused, for all servers, in the dtype that these
compute in. `lm_head.weight` is named, tied or not, unless every server is known to tie it: one that holds it apart
would keep the old one. Files of earlier versions are deleted once newer ones are loaded.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.data.adapter_name import ADAPTER_NAME, new_adapter_name
from headrace.data.errors import InvalidInput
from headrace.trainer.sync.http import ServerFailed


@dataclass(frozen=True)
class Gap:
    """The difference between a server's log-probs and the trainer's."""

    largest: float
    mean: float

    def within(self, allowed: Gap) -> bool:
        return self.largest <= allowed.largest and self.mean <= allowed.mean


#: Half of the distance between 1 and the next number: the largest relative error of one rounding. The finest first.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
#: Two float32 computations differ by more than their roundings: kernels sum in other orders, and some multiply in
#: fewer bits. Below so much nothing is said to be wrong.
LEAST_GAP = 1e-3
#: Layers that a shallow model counts as: what a sharp attention amplifies does not shrink with the depth.
LEAST_LAYERS = 16
#: Layers of a model that nobody told the depth of.
USUAL_LAYERS = 32
#: A short probe says little of how far log-probs lie apart: as if so many more tokens lay 1 off the mean.
PRIOR_TOKENS = 4
#: How many times what is expected is allowed: in the mean over all tokens, which finds wrong weights, and for a single
#: one, which may be far off by itself where a rounding decides what a sharp attention looks at. Seen in small models of
#: 2 to 12 layers, bfloat16 and float16: 0.01 to 0.2 of what is then allowed, 0.5 and 0.8 with weights so large that
#: attention saturates; with one layer of another model, at least 2.5 times the allowed mean over 96 tokens.
MEAN_SAFETY, LARGEST_SAFETY = 2.5, 8.0


@dataclass(frozen=True)
class Probe:
    """Tokens, and what the trainer's own forward pass says of them: a server with the same weights agrees.

    `log_probs[i]` is that of `ids[i + 1]` at temperature 1, under the very weights that are published.

    `dtype` is what the trainer computed them in, where that is not what the weights are in: `bfloat16` under autocast.
    `layers` is the model's depth, which decides how much rounding adds up.
    """

    ids: Sequence[int]
    log_probs: Sequence[float]
    dtype: str | None = None
    layers: int = USUAL_LAYERS

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


def tolerance(probe: Probe, *dtypes: str | None) -> Gap:
    """The gap that rounding explains, in the coarsest of these precisions; float32's where none is known.

    A layer adds to the states twice and rounds each sum; what it computes in between is rounded as often again. Errors
    of 4 roundings a layer, independent of each other, add up to `rounding * sqrt(4 * layers)` of a state's size, and
    move a logit by as much of what logits spread by. That spread is the probe's own: of its log-probs around their
    mean. Of n errors that are normal the largest is some sqrt(2 ln 2n) times the typical one: so much, and no more, a
    longer probe may be off.
    """
    known = [rounding for dtype, rounding in ROUNDING.items() if dtype in dtypes]
    values, count = probe.log_probs, len(probe.log_probs)
    mean = sum(values) / count
    spread = math.sqrt((sum((value - mean) ** 2 for value in values) + PRIOR_TOKENS) / (count + PRIOR_TOKENS))
    roundings = 4 * max(probe.layers, LEAST_LAYERS)
    expected = (known[-1] if known else ROUNDING["float32"]) * math.sqrt(roundings) * spread
    return Gap(
        max(LARGEST_SAFETY * expected * math.sqrt(2 * math.log(2 * count)), LEAST_GAP),
        max(MEAN_SAFETY * expected * (1 + 2 / math.sqrt(count)), LEAST_GAP),
    )


if TYPE_CHECKING:
    import torch

    from headrace.engine.cuda_ipc import GpuBlock


@dataclass(frozen=True)
class AdapterWeights:
    """A LoRA adapter of one version: `tensors` by peft's names and `config` (`adapter_config.json`) for a server that
    takes adapters; all weights with it `merged`, what is new of them on a device (None: the model's), for one that does
    not."""

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    merged: Callable[..., Mapping[str, torch.Tensor]]

    @property
    def rank(self) -> int:
        return int(self.config["r"])


#: peft's name of the file with an adapter's matrices.
ADAPTER_FILE = "adapter_model.safetensors"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: A folder that this module made.
WEIGHT_FOLDER = re.compile(rf"weights-\d+-[0-9a-f]{{32}}|{ADAPTER_NAME.pattern}")
NO_FOLDER = "sync.folder is not set; weights that travel by files need one that every server can read"
SHARED_MEMORY = Path("/dev/shm")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class WeightTransport:
    """How one version travels, to all servers together: as a block of GPU memory, as one of shared memory, as files,
    as an adapter's files; in which dtype (None: as it is), and with `lm_head.weight` named where it is tied to the
    embeddings (not needed where every server ties them too)."""

    cuda_ipc: bool = False
    shared: bool = False
    files: bool = False
    adapter: bool = False
    dtype: str | None = None
    tied_head: bool = True


class WeightDelivery:
    """Weights of one version, on their way by `transport`; `close` once every server has answered."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor] | AdapterWeights,
        version: int,
        transport: WeightTransport,
        folder: Path | None = None,
    ) -> None:
        self.version = version
        self.block: Any = None
        self.manifest: list[dict[str, Any]] = []
        self.on_gpu: GpuBlock | None = None
        self.folder: Path | None = None
        #: The folder of an adapter has its name on the servers.
        self.adapter: Path | None = None
        try:
            if isinstance(weights, AdapterWeights):
                self.dtype = dtype_of(weights.tensors)
                if transport.adapter:
                    self._write_adapter(weights, folder)
                whole = transport.cuda_ipc or transport.shared or transport.files
                # What travels by memory or files waits in the host's memory: a GPU has no room for a second model.
                weights = weights.merged(device=None if transport.cuda_ipc else "cpu") if whole else {}
            else:
                self.dtype = dtype_of(weights)
            if transport.cuda_ipc:
                self._pack(_named(weights, replace(transport, dtype=None)), transport.dtype)
            named = _named(weights, transport) if transport.shared or transport.files else {}
            if named:
                self.dtype = dtype_of(named)
            if transport.shared:
                self._share(named)
            if transport.files:
                self._write(named, folder)
        except BaseException:
            self.close()
            raise

    @property
    def adapter_name(self) -> str | None:
        return None if self.adapter is None else self.adapter.name

    def close(self) -> None:
        """Frees the memory, and deletes the folders of earlier versions."""
        self.on_gpu = None
        if self.block is not None:
            self.block.close()
            self.block.unlink()
            self.block = None
        mine = [made for made in (self.folder, self.adapter) if made is not None]
        for other in mine[0].parent.iterdir() if mine else ():
            if WEIGHT_FOLDER.fullmatch(other.name) and other not in mine:
                shutil.rmtree(other, ignore_errors=True)

    def _pack(self, tensors: Mapping[str, torch.Tensor], dtype: str | None) -> None:
        import torch

        from headrace.engine.cuda_ipc import GpuBlock

        device = device_of(tensors)
        assert device is not None
        self.on_gpu = GpuBlock(tensors, None if dtype is None else getattr(torch, dtype), device)
        self.dtype = _coarsest({entry["dtype"] for entry in self.on_gpu.manifest})

    def _share(self, tensors: Mapping[str, torch.Tensor]) -> None:
        from headrace.engine.weights import layout, share

        size = layout(tensors)[1]
        if SHARED_MEMORY.is_dir():  # writing past its end would not be an error but the end of this process
            disk = os.statvfs(SHARED_MEMORY)
            if size > disk.f_bavail * disk.f_frsize:
                raise InvalidInput(
                    f"{SHARED_MEMORY} has {disk.f_bavail * disk.f_frsize} bytes free and the weights take {size}; "
                    "set sync.via to files"
                )
        self.block, self.manifest = share(tensors)

    def _write(self, tensors: Mapping[str, torch.Tensor], folder: Path | None) -> None:
        made = _made(folder, f"weights-{self.version}-{uuid.uuid4().hex}")
        # Tied tensors are one in memory, which a file does not know.
        apart: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in tensors.items():
            held = tensor.cpu().contiguous()
            apart[name] = held.clone() if held.data_ptr() in seen else held
            seen.add(held.data_ptr())
        _save(apart, made / "model.safetensors")
        self.folder = made

    def _write_adapter(self, adapter: AdapterWeights, folder: Path | None) -> None:
        made = _made(folder, new_adapter_name(self.version))
        _save({name: tensor.cpu().contiguous() for name, tensor in adapter.tensors.items()}, made / ADAPTER_FILE)
        (made / "adapter_config.json").write_text(json.dumps(adapter.config, indent=2) + "\n")
        self.adapter = made


def converted(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """The tensor in a dtype, where that has fewer bits: more would carry nothing more. Rounded as a server rounds what
    it loads."""
    import torch

    wanted = None if dtype is None else getattr(torch, dtype)
    if wanted is None or tensor.dtype != torch.float32:
        return tensor
    return tensor.to(wanted)


def _named(weights: Mapping[str, torch.Tensor], transport: WeightTransport) -> dict[str, torch.Tensor]:
    """The tensors to be sent: converted, each once however many names it has."""
    from headrace.engine.weights import storage_key

    named: dict[str, torch.Tensor] = {}
    done: dict[tuple[int, ...], torch.Tensor] = {}
    for name, tensor in weights.items():
        key = storage_key(tensor)
        if key not in done:
            done[key] = converted(tensor.detach(), transport.dtype)
        named[name] = done[key]
    if EMBED in named and transport.tied_head:
        named.setdefault(HEAD, named[EMBED])
    elif EMBED in named and named.get(HEAD) is named[EMBED]:
        del named[HEAD]
    return named


def _made(folder: Path | None, name: str) -> Path:
    if folder is None:
        raise InvalidInput(NO_FOLDER)
    made = folder.resolve() / name
    made.mkdir(parents=True)
    return made


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, file, {"format": "pt"})


def device_of(weights: Mapping[str, torch.Tensor]) -> torch.device | None:
    """The device of the weights; None where they are on several, or there are none."""
    found = {tensor.device for tensor in weights.values()}
    return found.pop() if len(found) == 1 else None


def dtype_of(weights: Mapping[str, torch.Tensor]) -> str:
    """The dtype of the weights; the coarsest where there are several. Raises `InvalidInput` for any other than
    floating-point ones of 16 or 32 bits."""
    return _coarsest({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})


def _coarsest(names: set[str]) -> str:
    for name in DTYPES:
        if name in names and names <= set(DTYPES):
            return name
    raise InvalidInput(f"weights are {', '.join(sorted(names)) or 'none'}; they must be float32, float16 or bfloat16")
