"""Weights in a block of a GPU's memory that two processes share (CUDA IPC): they never leave the device.

A trainer packs its tensors into one block (`GpuBlock`), exports it once for each engine, and keeps it until that one
has answered. The engine copies the block to memory of its own before it loads anything (`received`), so that
nothing of what becomes of the trainer meanwhile is ever half loaded, and checks what it copied by its sum.

Two processes can do this where they run on the same machine and GPU (`GpuId`) and nothing stands between them, as a
container's own namespaces may. The former can be compared, the latter is tried with a few bytes.

torch counts who has an exported block: freed by the trainer while an engine has it open, or before that one came to
open it, its memory is not used for anything else until the engine has closed it.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headrace.engine.weights import BadWeights, layout, placed, read_manifest

#: Another one after every start of the machine, and the same in all of its containers.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

#: Bytes that `checksum` takes at once.
WORD = 8


@dataclass(frozen=True)
class GpuId:
    """One GPU of one machine: the id of the machine's last start, and the GPU's UUID."""

    host: str
    uuid: str


def gpu_id(device: torch.device) -> GpuId | None:
    """Which GPU a device is; None where it is none, or the machine does not say which one it is."""
    if device.type != "cuda":
        return None
    try:
        host = BOOT_ID.read_text().strip()
    except OSError:
        return None
    return GpuId(host, str(torch.cuda.get_device_properties(device).uuid))


@dataclass(frozen=True)
class CudaHandle:
    """An exported block, for one process to open once. Bytes are base64, so that it is JSON as it stands.

    memory, offset, size     the allocation that the block is a part of, by CUDA's handle, and the part
    counter, counter_offset  where torch counts who has it open
    event, event_sync        what the opener waits for before it reads, by CUDA's handle
    """

    memory: str
    offset: int
    size: int
    counter: str
    counter_offset: int
    event: str
    event_sync: bool


def packed(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, device: torch.device
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Copies of tensors in one block of bytes on a device, and their manifest, as `weights.share` makes them. float32
    ones become `dtype`, where it is given, while they are copied: no second copy is held."""
    manifest, size = layout(tensors, dtype)
    block = torch.empty(max(size, 64), dtype=torch.uint8, device=device)
    written: set[int] = set()
    with torch.no_grad():
        for entry, tensor in zip(manifest, tensors.values(), strict=True):
            if entry["offset"] not in written:
                written.add(entry["offset"])
                _view(block, entry).copy_(tensor)
    return block, manifest


def checksum(block: torch.Tensor) -> int:
    """The sum of a block's bytes, taken as 64-bit numbers. Waits until they are written."""
    return int(block.view(torch.int64).sum())


class GpuBlock:
    """Tensors packed in a block of their GPU's memory, to be exported; many threads may do so at once.

    The work is done on a stream of its own: an engine that opens the block waits for what was queued there, and not for
    what the trainer queues meanwhile.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None, device: torch.device) -> None:
        """Raises `torch.OutOfMemoryError` where the device has no room for it."""
        torch.cuda.ipc_collect()  # frees earlier blocks that an engine had open when they were dropped here
        self._stream = _stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._lock = threading.Lock()
        with torch.cuda.stream(self._stream):
            self._block, self.manifest = packed(tensors, dtype, device)
            self.checksum = checksum(self._block)

    @property
    def gpu_uuid(self) -> str:
        return str(torch.cuda.get_device_properties(self._block.device).uuid)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What was packed, as views into the block."""
        return read_manifest(self.manifest, lambda entry: _view(self._block, entry))

    def export(self) -> CudaHandle:
        """A handle for one engine."""
        with self._lock, torch.cuda.stream(self._stream):
            _, memory, size, offset, counter, counter_offset, event, sync = self._block.untyped_storage()._share_cuda_()
        text = [base64.b64encode(part).decode() for part in (memory, counter, event)]
        return CudaHandle(text[0], offset, size, text[1], counter_offset, text[2], bool(sync))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all blocks: what is freed is used again on the stream that it was allocated on alone."""
    return torch.cuda.Stream(device)


def trial_block(device: torch.device) -> GpuBlock:
    """A few bytes that nobody can guess, to see whether another process can read them."""
    secret = torch.frombuffer(bytearray(os.urandom(64)), dtype=torch.float32)
    return GpuBlock({"trial": secret}, None, device)


@contextmanager
def opened(handle: CudaHandle, device: torch.device) -> Iterator[torch.Tensor]:
    """The bytes of another process's block, on the same device. They are read within this context alone, and by then
    finished. Raises `BadWeights` where it cannot be opened."""
    if device.type != "cuda":
        raise BadWeights(f"this engine computes on {device.type}, and CUDA IPC needs the GPU that the block is on")
    if handle.size % WORD:
        raise BadWeights(f"the block has {handle.size} bytes; that is a multiple of {WORD}")
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        memory, counter, event = (base64.b64decode(text) for text in (handle.memory, handle.counter, handle.event))
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(
            index, memory, handle.size, handle.offset, counter, handle.counter_offset, event, handle.event_sync
        )
    except (RuntimeError, ValueError) as error:
        raise BadWeights(f"the block of GPU memory cannot be opened: {error}") from error
    block = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    del storage
    try:
        yield block
    finally:
        torch.cuda.synchronize(index)
        del block


def received(
    handle: CudaHandle, manifest: list[dict[str, Any]], expected: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """The tensors of another process's block, copied: on the device, or in the CPU's memory where it has no room for
    them. Raises `BadWeights` where it cannot be opened, or what was copied is not what was packed (`checksum`)."""
    with opened(handle, device) as block:
        try:
            copy = block.clone()
        except torch.OutOfMemoryError:
            copy = block.cpu()
        del block
        found = checksum(copy)
    if found != expected:
        raise BadWeights("the block of GPU memory changed while it was copied: its sum is another")
    try:
        return read_manifest(manifest, lambda entry: _view(copy, entry))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BadWeights(f"the manifest does not fit a block of {len(copy)} bytes: {error}") from error


def _view(block: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape, place = placed(entry, len(block))
    return block[place].view(dtype).view(shape)
