"""Keys and values of what has been computed: one row a running sequence, the running rows first.

Rows are kept dense: the row of a sequence that ends is taken by the last one. A batch of all running sequences is
therefore a slice, not a gather. Memory grows with what is used, up to `rows` times `length` tokens.
"""

from __future__ import annotations

import torch


class Cache:
    """`layers` pairs of (row, head, position, width) tensors."""

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
        """Room for so many rows of such a length; what is there is kept."""
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
        """Puts the (token, head, width) keys and values of tokens into their rows, at their positions."""
        held = self._held[layer]
        held[0].transpose(1, 2)[rows, at] = keys
        held[1].transpose(1, 2)[rows, at] = values

    def read(self, layer: int, rows: slice, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` keys and values of some rows."""
        held = self._held[layer]
        return held[0, rows, :, :length], held[1, rows, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        self._held[:, :, target, :, :length] = self._held[:, :, source, :, :length]

    def take(self, rows: list[int], at: list[int], size: int) -> torch.Tensor:
        """Blocks of (layer, 2, head, position, width), block i from position `at[i]` of row `rows[i]`."""
        return self._blocks()[self._places(rows, at, size)].permute(0, 2, 3, 4, 1, 5)

    def fill(self, rows: list[int], at: list[int], blocks: torch.Tensor) -> None:
        """Puts blocks back, block i at position `at[i]` of row `rows[i]`."""
        self._blocks()[self._places(rows, at, blocks.shape[-2])] = blocks.permute(0, 4, 1, 2, 3, 5)

    def _blocks(self) -> torch.Tensor:
        """Everything held, as (row, position, layer, 2, head, width)."""
        return self._held.permute(2, 4, 0, 1, 3, 5)

    def _places(self, rows: list[int], at: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._held.device
        where = torch.tensor(at, device=device)[:, None] + torch.arange(size, device=device)
        return torch.tensor(rows, device=device)[:, None], where
