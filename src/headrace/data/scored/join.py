"""The answer of `GET /batch` out of pieces: as plain JSON, or as one gzip member that nothing was compressed for.

One member, since common clients read only the first of several.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from isal import isal_zlib

from headrace.data.scored.piece import Piece, inflate

HEAD, COMMA, TAIL = b'{"batch":[', b",", b"]}"
#: Deflate, no name, no time, of an unknown system.
_GZIP = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


def join(pieces: Iterable[Piece]) -> bytes:
    parts = [HEAD]
    for n, piece in enumerate(pieces):
        if n:
            parts.append(COMMA)
        parts.append(inflate(piece))
    return b"".join((*parts, TAIL))


def join_gzip(pieces: Iterable[Piece]) -> bytes:
    parts = [_GZIP, _stored(HEAD)]
    size, crc = len(HEAD), isal_zlib.crc32(HEAD)
    for n, piece in enumerate(pieces):
        if n:
            parts.append(_COMMA)
            size, crc = size + len(COMMA), isal_zlib.crc32(COMMA, crc)
        parts.append(piece.data)
        size, crc = size + piece.size, isal_zlib.crc32_combine(crc, piece.crc, piece.size)
    parts += (_stored(TAIL, last=True), struct.pack("<II", isal_zlib.crc32(TAIL, crc), (size + len(TAIL)) & 0xFFFFFFFF))
    return b"".join(parts)


def gzip_piece(piece: Piece) -> bytes:
    """One group alone as a gzip member."""
    return b"".join(
        (_GZIP, piece.data, _stored(b"", last=True), struct.pack("<II", piece.crc, piece.size & 0xFFFFFFFF))
    )


def _stored(text: bytes, last: bool = False) -> bytes:
    """A block that is not compressed; after a fragment it begins on a byte, as it must."""
    return struct.pack("<BHH", last, len(text), len(text) ^ 0xFFFF) + text


_COMMA = _stored(COMMA)
