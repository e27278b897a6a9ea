"""A frame reads back bit for bit, or not at all."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.data import frame
from headrace.data.errors import FrameError

HEADERS = st.binary(max_size=64)
BODIES = st.lists(st.binary(max_size=64), max_size=4)

# One whose header and body both need padding, so that every kind of byte is there.
SAMPLE = frame.frame_bytes(frame.FrameKind.MESSAGE, b"header-5", [b"the body", b" in parts"])


@given(kind=st.integers(0, 255), serial=st.integers(0, 2**64 - 1), header=HEADERS, body=BODIES)
def test_a_frame_reads_back_bit_for_bit(kind: int, serial: int, header: bytes, body: list[bytes]) -> None:
    data = b"".join(frame.encode(kind, header, body, serial=serial))
    found = frame.decode(data)
    assert (found.kind, found.serial, found.size) == (kind, serial, len(data))
    assert bytes(found.header) == header
    assert bytes(found.body) == b"".join(body)


@given(header=HEADERS, body=BODIES)
def test_frames_and_bodies_begin_at_multiples_of_eight(header: bytes, body: list[bytes]) -> None:
    data = frame.frame_bytes(frame.FrameKind.COMMIT, header, body)
    assert len(data) % frame.ALIGN == 0
    assert frame.read_preamble(data).body_at % frame.ALIGN == 0


@given(frames=st.lists(st.tuples(HEADERS, BODIES), min_size=1, max_size=5), lead=st.integers(0, 3))
def test_frames_follow_each_other(frames: list[tuple[bytes, list[bytes]]], lead: int) -> None:
    data = bytes(8 * lead) + b"".join(frame.frame_bytes(frame.FrameKind.COMMIT, *parts) for parts in frames)
    at = 8 * lead
    for header, body in frames:
        found = frame.decode(data, at)
        assert (bytes(found.header), bytes(found.body)) == (header, b"".join(body))
        at += found.size
    assert at == len(data)


@given(header=HEADERS, body=BODIES)
def test_a_body_crc_that_is_known_gives_the_same_frame(header: bytes, body: list[bytes]) -> None:
    known = frame.encode(frame.FrameKind.COMMIT, header, body, body_crc=frame.checksum(body))
    assert b"".join(known) == frame.frame_bytes(frame.FrameKind.COMMIT, header, body)


@pytest.mark.parametrize("kept", range(len(SAMPLE)))
def test_a_frame_cut_anywhere_is_refused(kept: int) -> None:
    with pytest.raises(FrameError, match="cut short"):
        frame.decode(SAMPLE[:kept])


@pytest.mark.parametrize("at", range(len(SAMPLE)))
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_frame_with_any_byte_changed_is_refused(at: int, flip: int) -> None:
    damaged = bytearray(SAMPLE)
    damaged[at] ^= flip
    with pytest.raises(FrameError):
        frame.decode(damaged)


@settings(max_examples=50)
@given(header=HEADERS, body=BODIES, data=st.data())
def test_random_frames_refuse_random_damage(header: bytes, body: list[bytes], data: st.DataObject) -> None:
    damaged = bytearray(frame.frame_bytes(frame.FrameKind.COMMIT, header, body))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        frame.decode(damaged)


def test_another_format_version_is_refused_with_both_versions_named() -> None:
    """Even where its checksums are right: it is a frame, of a release to come."""
    lead = bytearray(SAMPLE[:32])
    lead[4] = frame.FORMAT_VERSION + 1
    header = SAMPLE[36:44]
    later = bytes(lead) + struct.pack("<I", crc32c(header, crc32c(bytes(lead)))) + SAMPLE[36:]
    with pytest.raises(FrameError, match=rf"version {frame.FORMAT_VERSION + 1}; .* version {frame.FORMAT_VERSION}"):
        frame.decode(later)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        frame.decode(data)
