"""Keys and values of computed tokens: of running sequences (`KVCache`), and of prefixes that sequences share
(`PrefixCache`)."""

from __future__ import annotations

import mmap
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch


class KVCache:
    """`layers` pairs of (row, head, position, width) tensors: one row for each running sequence, the running rows
    first.

    Rows are kept dense: the row of a sequence that ends is taken by the last one. A batch of all running sequences is
    therefore a slice, not a gather. Memory grows with what is used, up to `rows` times `length` tokens.
    """

    FIRST_ROWS, FIRST_LENGTH = 8, 128

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        width: int,
        rows: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_rows, self.max_length = rows, length
        self.shape = (layers, 2, heads, width)
        self._options = {"dtype": dtype, "device": device}
        self._rows = self._length = 0
        self._held = torch.empty(0)
        self.reserve(min(rows, self.FIRST_ROWS), min(length, self.FIRST_LENGTH))

    @property
    def held_bytes(self) -> int:
        return int(self._held.nbytes)

    def reserve(self, rows: int, length: int) -> None:
        """Makes room for so many rows of such a length; keeps what is held. Raises `ValueError` beyond the limits."""
        if rows <= self._rows and length <= self._length:
            return
        if rows > self.max_rows or length > self.max_length:
            raise ValueError(f"{rows} rows of {length} tokens; there is room for {self.max_rows} of {self.max_length}")
        wide = min(self.max_rows, max(rows, 2 * self._rows if rows > self._rows else self._rows))
        long = min(self.max_length, max(length, 2 * self._length if length > self._length else self._length))
        layers, two, heads, width = self.shape
        # Zeros: what is masked out is multiplied by 0, and 0 times the NaN of stray memory is NaN.
        held = torch.zeros(layers, two, wide, heads, long, width, **self._options)
        if self._held.numel():
            held[:, :, : self._rows, :, : self._length] = self._held
        self._held, self._rows, self._length = held, wide, long

    def write(self, layer: int, rows: torch.Tensor, at: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores the (token, head, width) keys and values of tokens in their rows, at their positions."""
        held = self._held[layer]
        held[0].transpose(1, 2)[rows, at] = keys
        held[1].transpose(1, 2)[rows, at] = values

    def read(self, layer: int, rows: slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first `length` keys and values of some rows."""
        held = self._held[layer]
        return held[0, rows, :, :length], held[1, rows, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` keys and values of one row over another's."""
        self._held[:, :, target, :, :length] = self._held[:, :, source, :, :length]

    def take(self, rows: list[int], at: list[int], size: int) -> torch.Tensor:
        """Blocks of (layer, 2, head, position, width), block i from position `at[i]` of row `rows[i]`."""
        return self._blocks()[self._places(rows, at, size)].permute(0, 2, 3, 4, 1, 5)

    def fill(self, rows: list[int], at: list[int], blocks: torch.Tensor) -> None:
        """Stores blocks, block i at position `at[i]` of row `rows[i]`."""
        self._blocks()[self._places(rows, at, blocks.shape[-2])] = blocks.permute(0, 4, 1, 2, 3, 5)

    def _blocks(self) -> torch.Tensor:
        """A view of everything held, as (row, position, layer, 2, head, width)."""
        return self._held.permute(2, 4, 0, 1, 3, 5)

    def _places(self, rows: list[int], at: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._held.device
        where = torch.tensor(at, device=device)[:, None] + torch.arange(size, device=device)
        return torch.tensor(rows, device=device)[:, None], where


#: Tokens of a block: few, because a turn of a small game is: what is left over of a block is computed again.
BLOCK_TOKENS = 4
#: Bytes of a block's name, a digest: too long for two to be alike.
NAME_BYTES = 16
#: Bytes of the index for one block, at most: its name (49), its number (28), and its part of the table (70 to 117: the
#: table doubles each time that it is full).
INDEX_BYTES = 200


class PrefixCache:
    """What was computed for the beginnings of earlier sequences, in blocks of (layer, key or value, head, position,
    width).

    A block holds the keys and values of `BLOCK_TOKENS` tokens and is found by those tokens and all before them. Blocks
    hold only as long as the weights do. The least recently used ones go first. `size` bounds all that it takes, in
    bytes: blocks, and the index by which they are found. It takes memory as blocks come, and gives all of it back when
    cleared.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], *, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers, two, heads, width = shape
        self._each: int = layers * two * heads * BLOCK_TOKENS * width * dtype.itemsize
        self._most = size // (self._each + INDEX_BYTES)
        self._shape = (self._most, layers, two, heads, BLOCK_TOKENS, width)
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._blocks = self._reserved()
        self._where: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._where)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory in use: on a CPU those of the blocks that were written, elsewhere of the whole
        reservation."""
        # A CPU's memory is taken page by page, when it is first written to; places are given from the first on.
        lazily = self._blocks.device.type == "cpu"
        blocks = self._each * (len(self._where) if lazily else self._most)
        entry = sys.getsizeof(bytes(NAME_BYTES)) + sys.getsizeof(self._most)
        return blocks + sys.getsizeof(self._where) + len(self._where) * entry

    def clear(self) -> None:
        """Drops every block and frees their memory."""
        if self._where:
            self._where = OrderedDict()
            self._blocks = torch.empty(0, **self._options)  # the old ones go first: there may be no room for both
            self._blocks = self._reserved()

    def _reserved(self) -> torch.Tensor:
        """Room for all blocks. On a CPU it is a mapping of its own: what it takes goes back to the system with it,
        whatever torch's allocator, which differs by processor, keeps of what it is given back."""
        size = self._most * self._each
        if self._options["device"].type != "cpu" or not size:
            return torch.empty(self._shape, **self._options)
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(mapped, dtype=self._options["dtype"]).view(self._shape)

    def find(self, tokens: list[int], most: int) -> list[int]:
        """The blocks that hold a prefix of `tokens`, of at most `most` tokens."""
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
        """The keys and values of some blocks."""
        return self._blocks[torch.tensor(blocks, device=self._blocks.device)]

    def place(self, tokens: list[int]) -> dict[int, int]:
        """Reserves a block for each whole block of `tokens` that is not cached: by the block, its index in `tokens`."""
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
        """Stores computed keys and values in the blocks that `place` reserved."""
        self._blocks[torch.tensor(blocks, device=self._blocks.device)] = computed


def _names(tokens: list[int]) -> Iterator[bytes]:
    """A key for each whole block of tokens: a digest of the block and of the key before."""
    data, name, size = array("i", tokens).tobytes(), b"", BLOCK_TOKENS * 4
    for at in range(0, len(data) - size + 1, size):
        name = blake2b(name + data[at : at + size], digest_size=NAME_BYTES).digest()
        yield name
