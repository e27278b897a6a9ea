"""Pieces are answers when they are put side by side."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.scored.groups import body, exact, groups, large

from headrace.data.scored import Piece, decode, gzip_piece, inflate, join, join_gzip, read_group, store


def piece(group: dict[str, Any]) -> Piece:
    return read_group(body(group)).piece


@given(found=st.lists(groups(), max_size=4))
def test_the_answer_is_the_json_of_its_groups(found: list[dict[str, Any]]) -> None:
    pieces = [piece(group) for group in found]
    assert exact(json.loads(join(pieces))) == exact({"batch": found})
    assert gzip.decompress(join_gzip(pieces)) == join(pieces)


@settings(max_examples=20)
@given(firsts=st.lists(st.integers(0, 2**31), max_size=20), repeat=st.integers(1, 3))
def test_every_common_reader_reads_all_of_it(firsts: list[int], repeat: int) -> None:
    pieces = [piece(large(first)) for first in firsts for _ in range(repeat)]
    answer, plain = join_gzip(pieces), join(pieces)
    assert zlib.decompress(answer, 31) == plain
    assert gzip.decompress(answer) == plain
    whole = zlib.decompressobj(31)
    assert b"".join(whole.decompress(answer[at : at + 1000]) for at in range(0, len(answer), 1000)) == plain
    assert (whole.eof, whole.unused_data) == (True, b"")


async def test_aiohttp_reads_all_of_it() -> None:
    pieces = [piece(large(first)) for first in range(20)]

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=join_gzip(pieces), headers={"content-encoding": "gzip"})

    app = web.Application()
    app.router.add_get("/batch", answer)
    async with TestClient(TestServer(app)) as client, client.get("/batch") as response:
        assert await response.read() == join(pieces)


@given(found=st.lists(st.tuples(groups(), st.booleans()), max_size=4))
def test_pieces_that_are_stored_make_the_same_answers(found: list[tuple[dict[str, Any], bool]]) -> None:
    packed = [piece(group) for group, _ in found]
    pieces = [store(inflate(one)) if plain else one for one, (_, plain) in zip(packed, found, strict=True)]
    assert join(pieces) == join(packed)
    assert gzip.decompress(join_gzip(pieces)) == join(packed)


@given(text=st.binary(max_size=300), repeat=st.sampled_from([1, 70_000]))
def test_what_is_stored_is_deflate_that_every_reader_reads(text: bytes, repeat: int) -> None:
    text = (text * repeat)[:200_000]
    one = store(text)
    assert zlib.decompress(one.data + b"\x03\x00", -15) == inflate(one) == text
    assert (one.size, one.crc) == (len(text), zlib.crc32(text))
    assert gzip.decompress(gzip_piece(one)) == text


def test_a_gzip_answer_is_compressed_though_its_pieces_are_stored() -> None:
    stored = [store(inflate(piece(large(first)))) for first in range(4)]
    assert len(join_gzip(stored)) < len(join(stored)) / 2


@given(groups())
def test_a_piece_knows_its_size_and_checksum(group: dict[str, Any]) -> None:
    one = piece(group)
    text = inflate(one)
    assert (one.size, one.crc) == (len(text), zlib.crc32(text))
    assert gzip.decompress(gzip_piece(one)) == text
    assert decode(one) == json.loads(text)


def test_a_damaged_piece_is_noticed_by_the_reader() -> None:
    one = piece(large(1))
    other = Piece(piece(large(2)).data, one.size, one.crc)
    with pytest.raises(gzip.BadGzipFile, match="CRC"):
        gzip.decompress(join_gzip([one, other]))
