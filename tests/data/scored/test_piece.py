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

from headrace.data.scored import Piece, decode, gzip_piece, inflate, join, join_gzip, read_group


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
