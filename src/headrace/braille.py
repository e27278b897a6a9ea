"""Curves drawn with braille characters, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def braille(values: Sequence[float], width: int, height: int) -> list[str]:
    """A curve of values between 0 and 1 in braille, `width` by `height` letters: two dots by four in each."""
    dots = [(0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80)]
    cells = [[0] * width for _ in range(height)]
    columns, rows = 2 * width, 4 * height
    for x in range(columns if values else 0):
        if len(values) > columns:
            value = values[x * len(values) // columns]
        elif x < len(values):
            value = values[x]
        else:
            break
        y = min(int((1 - min(max(value, 0.0), 1.0)) * rows), rows - 1)
        cells[y // 4][x // 2] |= dots[x % 2][y % 4]
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]
