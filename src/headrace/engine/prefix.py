"""What was computed for the beginnings of earlier sequences, in blocks, so that it need not be computed again.

A block holds the keys and values of `BLOCK` tokens and is found by those tokens and all before them. Blocks hold only
as long as the weights do. The least recently used ones go first. The size that it is given bounds all that it takes:
blocks, and the index by which they are found. It takes memory as blocks come, and gives all of it back when cleared.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

import torch

#: Small, because a turn of a small game is: what is left over of a block is computed again.
BLOCK = 4
#: Bytes of a block's name, a digest: too long for two to be alike.
NAME_BYTES = 16
#: Bytes of the index for one block, at most: its name (49), its number (28), and its part of the table (70 to 117: the
#: table doubles each time that it is full).
INDEX_BYTES = 200


class PrefixCache:
    """Blocks of (layer, key or value, head, position, width), up to `size` bytes with their index."""

    def __init__(
        self, shape: tuple[int, int, int, int], *, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers, two, heads, width = shape
        self._each: int = layers * two * heads * BLOCK * width * dtype.itemsize
        self._most = size // (self._each + INDEX_BYTES)
        self._shape = (self._most, layers, two, heads, BLOCK, width)
        self._options = {"dtype": dtype, "device": device}
        self._blocks = torch.empty(self._shape, **self._options)
        self._where: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._where)

    @property
    def held_bytes(self) -> int:
        """The memory that is taken: on a CPU by the blocks that were written, elsewhere by all there is room for."""
        # A CPU's memory is taken page by page, when it is first written to; places are given from the first on.
        lazily = self._blocks.device.type == "cpu"
        blocks = self._each * (len(self._where) if lazily else self._most)
        entry = sys.getsizeof(bytes(NAME_BYTES)) + sys.getsizeof(self._most)
        return blocks + sys.getsizeof(self._where) + len(self._where) * entry

    def clear(self) -> None:
        """Forgets every block, and gives their memory back."""
        if self._where:
            self._where = OrderedDict()
            self._blocks = torch.empty(0, **self._options)  # the old ones go first: there may be no room for both
            self._blocks = torch.empty(self._shape, **self._options)

    def find(self, tokens: list[int], most: int) -> list[int]:
        """The blocks that hold the beginning of `tokens`, no more than `most` tokens of it."""
        found: list[int] = []
        if self._where:
            for name in _names(tokens[:most]):
                block = self._where.get(name)
                if block is None:
                    break
                self._where.move_to_end(name)
                found.append(block)
        return found

    def get(self, blocks: list[int]) -> torch.Tensor:
        return self._blocks[torch.tensor(blocks, device=self._blocks.device)]

    def place(self, tokens: list[int]) -> dict[int, int]:
        """A place for each whole block of `tokens` that is not there yet: block by block's number among them."""
        placed: dict[int, int] = {}
        if self._most:
            for at, name in enumerate(_names(tokens)):
                if name in self._where:
                    self._where.move_to_end(name)
                    continue
                full = len(self._where) >= self._most
                block = self._where.popitem(last=False)[1] if full else len(self._where)
                self._where[name] = block
                placed[block] = at
        return placed

    def put(self, blocks: list[int], computed: torch.Tensor) -> None:
        self._blocks[torch.tensor(blocks, device=self._blocks.device)] = computed


def _names(tokens: list[int]) -> Iterator[bytes]:
    """A name for each whole block of some tokens: a digest of it and of the one before."""
    data, name, size = array("i", tokens).tobytes(), b"", BLOCK * 4
    for at in range(0, len(data) - size + 1, size):
        name = blake2b(name + data[at : at + size], digest_size=NAME_BYTES).digest()
        yield name
