"""What a checkpoint keeps besides weights (`trainer.pt`), written and read by any number of ranks.

One process writes all of it into `trainer.pt`. Several write their own parts of the large tensors at the same time,
through torch's distributed checkpoints, into the folder `shards`; `trainer.pt` then has the name of each in its place.
Either is read by one process and by any number of ranks: each reads the parts that it needs, and nothing is exchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.trainer.ranks import Ranks

STATE_FILE, SHARDS = "trainer.pt", "shards"
#: The key of a dictionary that stands for a tensor: its value is the tensor's name in `shards`.
SHARDED = "$sharded"


def write_state(folder: Path, state: dict[str, Any], ranks: Ranks) -> None:
    """Writes a state of nested dictionaries and lists into a checkpoint's folder. Called by every rank, each with its
    own parts."""
    if ranks.alone:
        torch.save(state, folder / STATE_FILE)
        return
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor

    parts: dict[str, Tensor] = {}

    def named(leaf: Any, name: str) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        parts[name] = leaf
        return {SHARDED: name}

    rest = _replaced(state, named)
    dcp.save(parts, storage_writer=dcp.FileSystemWriter(folder / SHARDS), process_group=ranks.objects)
    if ranks.rank == 0:
        torch.save(rest, folder / STATE_FILE)


def read_state(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """What `write_state` was given, in this rank's parts. Raises as `torch.load` and torch's distributed checkpoints
    do."""
    from headrace.trainer.sharded import part_of

    rest = torch.load(folder / STATE_FILE, weights_only=True, map_location="cpu", mmap=not ranks.alone)
    if not (folder / SHARDS).exists():
        if ranks.alone:
            return dict(rest)
        found = _replaced(rest, lambda leaf, _: part_of(leaf, ranks) if _is_large(leaf) else leaf)
        return dict(found)
    parts = _read_parts(folder / SHARDS, ranks)
    filled = _replaced(rest, lambda leaf, _: leaf, lambda name: parts[name])
    return dict(filled)


def _read_parts(folder: Path, ranks: Ranks) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, zeros

    reader = dcp.FileSystemReader(folder)
    parts: dict[str, Tensor] = {}
    for name, kept in reader.read_metadata().state_dict_metadata.items():
        dtype = kept.properties.dtype
        if ranks.alone:
            parts[name] = torch.zeros(kept.size, dtype=dtype)
        else:
            parts[name] = zeros(kept.size, dtype=dtype, device_mesh=ranks.mesh, placements=[Shard(0)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads, as it should
        dcp.load(parts, storage_reader=reader, no_dist=True)
    return parts


def _is_large(leaf: Any) -> bool:
    """Whether ranks have parts of such a tensor; a number, such as a count of steps, each has whole."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def _replaced(
    value: Any, change: Callable[[Any, str], Any], filled: Callable[[str], Any] | None = None, name: str = ""
) -> Any:
    """A nested value whose leaves went through `change`, with their dotted names; what stands for a sharded tensor
    through `filled`, where that is given."""
    if isinstance(value, dict):
        if filled is not None and set(value) == {SHARDED}:
            return filled(value[SHARDED])
        return {
            key: _replaced(inner, change, filled, f"{name}.{key}" if name else str(key)) for key, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(inner, change, filled, f"{name}.{at}") for at, inner in enumerate(value))
    return change(value, name)
