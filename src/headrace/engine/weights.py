"""A model's weights by their names, and the ways in: a checkpoint's safetensors, or a block of memory, shared (here) or
a GPU's (`cuda_ipc`).

The tensors that a forward pass uses are fused (one for query, key and value; one for gate and up). A name of the
checkpoint is a view into them, so whatever is loaded by name is at once what is computed with. A load is all or
nothing: names, shapes and dtypes are checked before the first byte is copied.

Tied embeddings: `lm_head.weight` is the same tensor as `model.embed_tokens.weight`. A load may leave it out, or bring
it equal; one that brings it different is refused, since half of it would be lost.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import torch

from headrace.data.errors import HeadraceError

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class BadWeights(HeadraceError, ValueError):
    """Weights that do not fit the model; none of them were loaded."""

    code = "bad_weights"


class Weights:
    """Views into a model's tensors, by their names in a checkpoint."""

    def __init__(self, views: Mapping[str, torch.Tensor], *, tied: bool) -> None:
        self.views = dict(views)
        self.tied = tied

    def load(self, found: Mapping[str, torch.Tensor]) -> None:
        """Loads a complete set of weights, or raises `BadWeights` and loads none."""
        found = dict(found)
        if self.tied:
            head, embed = found.pop(HEAD, None), found.get(EMBED)
            if head is not None and embed is not None and head is not embed and not torch.equal(head, embed):
                raise BadWeights(
                    f"{HEAD} differs from {EMBED}, but this model ties them; untie them in its config.json"
                )
        self._check(found)
        with torch.no_grad():
            for name, view in self.views.items():
                view.copy_(found[name])

    def _check(self, found: Mapping[str, torch.Tensor]) -> None:
        missing, unknown = self.views.keys() - found.keys(), found.keys() - self.views.keys()
        if missing:
            raise BadWeights(f"{len(missing)} weights are missing, the first {min(missing)!r}")
        if unknown:
            raise BadWeights(f"{len(unknown)} weights are not this model's, the first {min(unknown)!r}")
        for name, view in self.views.items():
            given = found[name]
            if given.shape != view.shape:
                raise BadWeights(f"{name} has shape {tuple(given.shape)}; this model's is {tuple(view.shape)}")
            if not given.dtype.is_floating_point:
                raise BadWeights(f"{name} is {given.dtype}; weights are floating-point")


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint's safetensors, from one file or from those that its index names. Raises
    `BadWeights`."""
    return dict(_tensors(folder))


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            files = sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        else:
            files = [folder / "model.safetensors"]
        for file in files:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    if not name.endswith("rotary_emb.inv_freq"):
                        yield name, tensors.get_tensor(name)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise BadWeights(f"{folder} holds no safetensors that can be read: {error}") from error


def shared(name: str, manifest: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Copies of the tensors in a block of shared memory: `manifest` has `name`, `dtype`, `shape` and `offset` of each.

    The block stays its writer's, who unlinks it once the answer is there.
    """
    try:
        block = _attach(name)
    except (OSError, ValueError) as error:
        raise BadWeights(f"no shared memory {name!r}: {error}") from error
    try:
        found = read_manifest(manifest, lambda entry: _tensor(block, entry))
        return found
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BadWeights(f"the manifest does not fit shared memory {name!r} of {block.size} bytes: {error}") from error
    finally:
        block.close()


def read_manifest(
    manifest: list[dict[str, Any]], read: Callable[[Mapping[str, Any]], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of a manifest by their names, each as `read` finds it; what has several names is read once."""
    once: dict[tuple[Any, ...], torch.Tensor] = {}
    found = {}
    for entry in manifest:
        same = (entry["offset"], entry["dtype"], *entry["shape"])
        if same not in once:
            once[same] = read(entry)
        found[str(entry["name"])] = once[same]
    return found


def _tensor(block: shared_memory.SharedMemory, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape, place = placed(entry, block.size)
    assert block.buf is not None
    return torch.frombuffer(bytearray(block.buf[place]), dtype=dtype).view(shape)


def placed(entry: Mapping[str, Any], size: int) -> tuple[torch.dtype, list[int], slice]:
    """The dtype and shape of a manifest's tensor, and the bytes that it takes in a block of `size` bytes. Raises
    `ValueError` where it lies outside."""
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"dtype is {entry['dtype']!r}; it is one of {', '.join(DTYPES)}")
    shape = [int(side) for side in entry["shape"]]
    count, offset = math.prod(shape) * dtype.itemsize, int(entry["offset"])
    if min(shape, default=1) <= 0 or offset < 0 or offset + count > size:
        raise ValueError(f"{entry['name']!r} at {offset} with {count} bytes lies outside")
    return dtype, shape, slice(offset, offset + count)


def _attach(name: str) -> shared_memory.SharedMemory:
    """Attaches a block without registering it with this process's resource tracker, which would unlink it at exit."""
    if sys.version_info >= (3, 13):
        return shared_memory.SharedMemory(name=name, track=False)
    from multiprocessing import resource_tracker

    register = resource_tracker.register
    resource_tracker.register = lambda *_: None
    try:
        return shared_memory.SharedMemory(name=name)
    finally:
        resource_tracker.register = register


def share(tensors: Mapping[str, torch.Tensor], name: str | None = None) -> tuple[Any, list[dict[str, Any]]]:
    """Writes tensors into a new block of shared memory; returns the block and its manifest, as `shared` reads them. One
    that has several names is written once. The caller closes and unlinks the block once every reader is done."""
    manifest, size = layout(tensors)
    block = shared_memory.SharedMemory(name=name, create=True, size=max(size, 1))
    assert block.buf is not None
    written: set[int] = set()
    for entry, tensor in zip(manifest, tensors.values(), strict=True):
        offset = entry["offset"]
        if offset not in written:
            written.add(offset)
            flat = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy()
            block.buf[offset : offset + len(flat)] = flat.data
    return block, manifest


def layout(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> tuple[list[dict[str, Any]], int]:
    """Where each tensor goes in one block, as a manifest, and the size of the block: each begins on a multiple of 64
    bytes, and one that has several names has one place. `dtype` is what float32 ones become."""
    names = {known: said for said, known in DTYPES.items()}
    manifest: list[dict[str, Any]] = []
    places: dict[tuple[int, ...], int] = {}
    size = 0
    for name, tensor in tensors.items():
        kept = tensor.dtype if dtype is None or tensor.dtype != torch.float32 else dtype
        key = storage_key(tensor)
        if key not in places:
            places[key] = size
            size += -(-tensor.numel() * kept.itemsize // 64) * 64
        manifest.append({"name": name, "dtype": names[kept], "shape": list(tensor.shape), "offset": places[key]})
    return manifest, size


def storage_key(tensor: torch.Tensor) -> tuple[int, ...]:
    """What a tensor is in memory: the same for one that has several names."""
    return (tensor.data_ptr(), *tensor.shape, *tensor.stride(), tensor.element_size())
