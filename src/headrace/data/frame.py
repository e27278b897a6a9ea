"""The packed frame: one self-checking run of bytes that holds a msgpack header and raw little-endian arrays.

It is what the journal appends, what a Ray call carries and what the pool's HTTP routes send.

    preamble   36 bytes: magic, format version, kind, header length, body CRC, body length, serial, head CRC
    header     msgpack, zero-padded so that the body begins at a multiple of 8
    body       arrays, one after the other, as the header says

The head CRC covers preamble and header, the body CRC the body: the pool rewrites a header (it fills in what it
assigned) without touching the arrays again. A frame reads back bit for bit or raises `FrameError`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c as _crc32c

from headrace.data.errors import ForeignFrame, FrameError

MAGIC = b"HRF\xa7"
FORMAT_VERSION = 1
#: Bytes at a multiple of which a frame and its body begin, so that arrays can be read in place.
ALIGN = 8

_LEAD = struct.Struct("<4sBBHIIQQ")
_HEAD_CRC = struct.Struct("<I")
PREAMBLE_SIZE = _LEAD.size + _HEAD_CRC.size

Buffer = bytes | bytearray | memoryview


class FrameKind:
    """What a frame holds. The numbers are on disk: a number is never given a second meaning."""

    SEGMENT = 1
    COMMIT = 2
    SNAPSHOT_END = 3
    MESSAGE = 4
    SEGMENT_END = 5


class Frame(NamedTuple):
    """A decoded frame: `header` and `body` are views into the bytes it was read from. One that was read from a file
    says which, and where in it its body begins."""

    kind: int
    serial: int
    header: memoryview
    body: memoryview
    size: int
    path: Path | None = None
    body_at: int = 0


class Preamble(NamedTuple):
    """What stands before a frame's header; sizes are in bytes."""

    version: int
    kind: int
    header_len: int
    body_crc: int
    body_len: int
    serial: int
    head_crc: int

    @property
    def body_at(self) -> int:
        """Where the body begins, counted from the frame's first byte."""
        return _padded(PREAMBLE_SIZE + self.header_len)

    @property
    def size(self) -> int:
        return self.body_at + self.body_len

    @property
    def padded_size(self) -> int:
        """Bytes up to where the next frame may begin."""
        return _padded(self.size)


def _padded(size: int) -> int:
    return (size + ALIGN - 1) // ALIGN * ALIGN


def checksum(parts: Sequence[Buffer]) -> int:
    """CRC32C of the parts as if they were one."""
    crc = 0
    for part in parts:
        crc = _crc32c(part, crc)
    return crc


def encode(
    kind: int, header: bytes, body: Sequence[Buffer] = (), *, serial: int = 0, body_crc: int | None = None
) -> list[Buffer]:
    """The frame as buffers for `writev` or `join`; `body_crc` spares the sum where it is known already.

    The last body is padded with zeros, outside its length, so that frames can follow each other aligned.
    """
    body_len = sum(len(part) for part in body)
    crc = checksum(body) if body_crc is None else body_crc
    lead = _LEAD.pack(MAGIC, FORMAT_VERSION, kind, 0, len(header), crc, body_len, serial)
    pad = _padded(PREAMBLE_SIZE + len(header)) - PREAMBLE_SIZE - len(header)
    head = b"".join((lead, _HEAD_CRC.pack(_crc32c(header, _crc32c(lead))), header, bytes(pad)))
    tail = _padded(body_len) - body_len
    return [head, *body, bytes(tail)] if tail else [head, *body]


def frame_bytes(kind: int, header: bytes, body: Sequence[Buffer] = ()) -> bytes:
    """The frame as one run of bytes."""
    return b"".join(encode(kind, header, body))


def read_preamble(data: Buffer, at: int = 0) -> Preamble:
    """The preamble at `at`, its magic checked (the rest needs the header: see `read_head`)."""
    if len(data) - at < PREAMBLE_SIZE:
        raise FrameError(f"frame cut short: {len(data) - at} bytes where a preamble takes {PREAMBLE_SIZE}")
    magic, version, kind, _, header_len, body_crc, body_len, serial = _LEAD.unpack_from(data, at)
    if magic != MAGIC:
        raise FrameError(f"not a frame: it begins with {bytes(data[at : at + 4])!r} instead of {MAGIC!r}")
    (head_crc,) = _HEAD_CRC.unpack_from(data, at + _LEAD.size)
    return Preamble(version, kind, header_len, body_crc, body_len, serial, head_crc)


def read_head(data: Buffer, at: int = 0) -> Preamble:
    """The preamble at `at`, undamaged and of this format version, with a whole header behind it.

    Every format version keeps the preamble's layout, so that a frame of another release (`ForeignFrame`) can be told
    from one whose version was damaged.
    """
    lead = read_preamble(data, at)
    view = memoryview(data)
    there = len(view) - at - PREAMBLE_SIZE
    header = view[at + PREAMBLE_SIZE : at + PREAMBLE_SIZE + lead.header_len]
    intact = there >= lead.header_len and _crc32c(header, _crc32c(view[at : at + _LEAD.size])) == lead.head_crc
    if lead.version != FORMAT_VERSION:
        raise (ForeignFrame if intact else FrameError)(
            f"frame of format version {lead.version}; this release reads version {FORMAT_VERSION}: "
            "use the release that wrote it"
        )
    if there < lead.header_len:
        raise FrameError(f"frame cut short: its header takes {lead.header_len} bytes, {there} are there")
    if not intact:
        raise FrameError("frame damaged: its header does not match its CRC32C")
    return lead


def decode(data: Buffer, at: int = 0) -> Frame:
    """The frame at `at`, whole and undamaged, or `FrameError`; `size` says where the next one begins."""
    lead = read_head(data, at)
    view = memoryview(data)
    header_at = at + PREAMBLE_SIZE
    body_at, body_end, end = at + lead.body_at, at + lead.size, at + lead.padded_size
    if len(view) < end:
        raise FrameError(
            f"frame cut short: its body takes {end - body_at} bytes, {max(0, len(view) - body_at)} are there"
        )
    body = view[body_at:body_end]
    if _crc32c(body) != lead.body_crc:
        raise FrameError("frame damaged: its body does not match its CRC32C")
    if any(view[header_at + lead.header_len : body_at]) or any(view[body_end:end]):
        raise FrameError("frame damaged: its padding is not zero")
    return Frame(lead.kind, lead.serial, view[header_at : header_at + lead.header_len], body, end - at)
