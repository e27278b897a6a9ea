"""`Piece`: a scored group's JSON as deflate that can stand anywhere in an answer; and answers made of pieces.

A piece is compressed (`deflate`), or it holds the JSON as it is, in deflate's stored blocks (`store`): the same format,
and an answer in plain JSON then costs no more than copying it. `GET /batch` is answered as plain JSON, or as one gzip
member for which only what is stored is compressed. One member, since common clients read only the first of several.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec
from isal import isal_zlib

_RAW_DEFLATE = -15  # `wbits` of a deflate stream without header and trailer
#: isal's fastest: the others save a fifth of the bytes for a third more time.
_COMPRESSION_LEVEL = 0
#: Bytes of JSON from which a stored piece is compressed for a gzip answer.
_COMPRESSED_FROM_BYTES = 200
#: A last, empty block: what makes a fragment a whole stream.
_END = b"\x03\x00"
#: Before a block that is not compressed: whether it is the last, its bytes, and the same with every bit turned.
_STORED_HEADER = struct.Struct("<BHH")
#: Bytes that such a block holds at most.
_STORED_BYTES = 0xFFFF
_HEAD, _COMMA, _TAIL = b'{"batch":[', b",", b"]}"
#: A gzip member's header: deflate, no name, no time, of an unknown system.
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


class Piece(msgspec.Struct, frozen=True, gc=False):
    """One group's JSON object, compressed or stored.

    `data` is raw deflate that refers to nothing before it, ends on a byte, and is not the last block of its stream.
    `size` and `crc` (CRC32) are those of the JSON.
    """

    data: bytes
    size: int
    crc: int


class ScoredGroup(msgspec.Struct, frozen=True, gc=False):
    """A group that was read: what it is, how many sequences it holds, and whose it is.

    `digest`: the length of its JSON and two checksums, together 64 bits, by which the same group is known again however
    it was packed; empty for one that nobody posted.
    """

    piece: Piece
    sequences: int
    env_id: int | None = None
    digest: str = ""


def deflate(text: bytes) -> Piece:
    """A group's JSON as a piece that is compressed."""
    stream = isal_zlib.compressobj(_COMPRESSION_LEVEL, isal_zlib.DEFLATED, _RAW_DEFLATE)
    data = stream.compress(text) + stream.flush(isal_zlib.Z_FULL_FLUSH)
    return Piece(data, len(text), isal_zlib.crc32(text))


def store(text: bytes) -> Piece:
    """A group's JSON as a piece that holds it as it is."""
    view = memoryview(text)
    parts: list[bytes | memoryview] = []
    for at in range(0, len(text), _STORED_BYTES):
        part = view[at : at + _STORED_BYTES]
        parts += (_stored_header(len(part)), part)
    return Piece(b"".join(parts), len(text), isal_zlib.crc32(text))


def inflate(piece: Piece) -> bytes:
    """The group's JSON."""
    if (stored := _stored_parts(piece)) is not None:
        return b"".join(stored)
    return _inflated(piece)


def _inflated(piece: Piece) -> bytes:
    return zlib.decompress(piece.data + _END, _RAW_DEFLATE, max(piece.size, 1))  # a tenth faster than isal's, at this


def _stored_parts(piece: Piece) -> list[memoryview] | None:
    """The JSON of a piece that is stored, as views into it; None where any block of it is compressed."""
    view, parts, at = memoryview(piece.data), [], 0
    while at < len(view):
        if len(view) - at < _STORED_HEADER.size:
            return None
        compressed, length, turned = _STORED_HEADER.unpack_from(view, at)
        if compressed or length ^ turned != _STORED_BYTES:
            return None
        at += _STORED_HEADER.size
        parts.append(view[at : at + length])
        at += length
    return parts if at == len(view) else None


def decode(piece: Piece) -> dict[str, Any]:
    """The group as Python values: all fourteen keys, None where the environment sent nothing."""
    found: dict[str, Any] = json.loads(inflate(piece))
    return found


def join(pieces: Iterable[Piece]) -> bytes:
    """The JSON of a batch of these groups."""
    parts: list[bytes | memoryview] = [_HEAD]
    for n, piece in enumerate(pieces):
        if n:
            parts.append(_COMMA)
        stored = _stored_parts(piece)
        parts += stored if stored is not None else (_inflated(piece),)
    return b"".join((*parts, _TAIL))


def join_gzip(pieces: Iterable[Piece]) -> bytes:
    """The same as one gzip member, out of the pieces' bytes as they are; those that are stored are compressed."""
    parts = [_GZIP_HEADER, _stored(_HEAD)]
    size, crc = len(_HEAD), isal_zlib.crc32(_HEAD)
    for n, piece in enumerate(pieces):
        if n:
            parts.append(_STORED_COMMA)
            size, crc = size + len(_COMMA), isal_zlib.crc32(_COMMA, crc)
        parts.append(_compressed(piece).data)
        size, crc = size + piece.size, isal_zlib.crc32_combine(crc, piece.crc, piece.size)
    parts += (
        _stored(_TAIL, last=True),
        struct.pack("<II", isal_zlib.crc32(_TAIL, crc), (size + len(_TAIL)) & 0xFFFFFFFF),
    )
    return b"".join(parts)


def gzip_piece(piece: Piece) -> bytes:
    """One group alone as a gzip member."""
    return b"".join(
        (
            _GZIP_HEADER,
            _compressed(piece).data,
            _stored(b"", last=True),
            struct.pack("<II", piece.crc, piece.size & 0xFFFFFFFF),
        )
    )


def _compressed(piece: Piece) -> Piece:
    """The piece, compressed where it is stored; what is too short to be is left as it is."""
    stored = _stored_parts(piece) if piece.size >= _COMPRESSED_FROM_BYTES else None
    return piece if stored is None else deflate(b"".join(stored))


def _stored(text: bytes, last: bool = False) -> bytes:
    """A block that is not compressed; after a fragment it begins on a byte, as it must."""
    return _stored_header(len(text), last) + text


def _stored_header(length: int, last: bool = False) -> bytes:
    return _STORED_HEADER.pack(last, length, length ^ _STORED_BYTES)


_STORED_COMMA = _stored(_COMMA)
