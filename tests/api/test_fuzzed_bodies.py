"""Bodies of the Trajectory API, gzip and JSON: read as any other program reads them, or refused, within their bound."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.atropos.groups import group
from tests.atropos.words import environment, registration
from tests.fuzzing import damaged, examples, mutated

from headrace.api.requests import BadGzip, gunzip, read_env_id, read_record
from headrace.data.errors import InvalidInput
from headrace.data.scored import values
from headrace.data.scored.read import read_group, read_groups
from headrace.net.server import BodyTooLarge
from headrace.pool.scored.types import EnvRegistration, Registration

GROUP = json.dumps(group(1, 4, 0)).encode()
#: Members that any compressor may write: fast, best, stored, empty, several, with a file's name.
MEMBERS = [
    gzip.compress(GROUP, 1, mtime=0),
    gzip.compress(GROUP, 9, mtime=0),
    gzip.compress(GROUP, 0, mtime=0),
    gzip.compress(b"", mtime=0) + gzip.compress(GROUP, mtime=0),
    b"\x1f\x8b\x08\x08\0\0\0\0\0\x03name\0" + gzip.compress(GROUP, mtime=0)[10:],
]
MAX_MB = 0.01


def unpacked(body: bytes) -> bytes | None:
    """What zlib makes of a body of any number of members; None where it is none."""
    found = b""
    try:
        while body:
            member = zlib.decompressobj(31)
            found += member.decompress(body, 100_000)
            if not member.eof:
                return None
            body = member.unused_data
    except zlib.error:
        return None
    return found


def test_what_any_compressor_writes_is_unpacked() -> None:
    for body in MEMBERS:
        assert gunzip(body, MAX_MB) == GROUP


@examples(100)
@given(body=st.sampled_from(MEMBERS).flatmap(damaged))
def test_a_damaged_body_is_what_zlib_makes_of_it_or_refused(body: bytes) -> None:
    known = unpacked(body)
    try:
        found = gunzip(body, MAX_MB)
    except BadGzip:
        assert known is None or body.count(b"\x1f\x8b") > 1
    except BodyTooLarge:
        assert known is None or len(known) > MAX_MB * 1e6
    else:
        assert len(found) <= MAX_MB * 1e6
        assert known is None or found == known


@examples(40)
@given(body=st.binary(max_size=200))
def test_bytes_that_are_no_gzip_are_refused(body: bytes) -> None:
    try:
        assert gunzip(b"\x1f\x8b\x08" + body, MAX_MB) is not None
    except (BadGzip, BodyTooLarge):
        pass


@examples(80)
@given(value=mutated(group(1, 3, 0, messages=[[{"role": "user", "content": "hi"}]] * 3)))
def test_a_group_with_anything_in_it_is_taken_or_refused(value: Any) -> None:
    body = json.dumps(value).encode()
    for read in (read_group, lambda text: read_groups(b"[" + text + b"]")):
        try:
            read(body)
        except InvalidInput:
            pass


@examples(40)
@given(body=damaged(GROUP))
def test_a_damaged_group_is_taken_or_refused(body: bytes) -> None:
    for read in (read_group, read_groups):
        try:
            read(body)
        except InvalidInput:
            pass


@pytest.mark.parametrize(("valid", "kind"), [(registration(), Registration), (environment(4), EnvRegistration)])
def test_a_registration_with_anything_in_it_is_taken_or_refused(valid: Any, kind: Any) -> None:
    @examples(60)
    @given(value=mutated(valid))
    def check(value: Any) -> None:
        try:
            found = values.parse_json(json.dumps(value).encode(), "the body")
            if isinstance(found, dict):
                read_record(found, kind)
                read_env_id(found)
        except InvalidInput:
            pass

    check()
