"""Events out of bytes, however they were cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.upstream.sse import Events

payloads = st.lists(st.binary(min_size=1).filter(lambda data: b"\n" not in data and b"\r" not in data), max_size=8)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({place % (len(data) + 1) for place in at})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def events(parts: list[bytes]) -> list[bytes]:
    splitter = Events()
    return [event for part in parts for event in splitter.feed(part)]


@given(payloads, st.lists(st.integers(0, 10_000)), st.sampled_from([b"\n", b"\r\n"]), st.sampled_from([b" ", b""]))
def test_any_chunking_gives_the_same_events(sent: list[bytes], at: list[int], end: bytes, space: bytes) -> None:
    if not space:  # one leading space belongs to the field, not to the data
        sent = [data.lstrip(b" ") or b"x" for data in sent]
    stream = b"".join(b"data:" + space + data + end + end for data in sent)
    assert events(cut(stream, at)) == sent


def test_comments_and_other_fields_are_passed_over() -> None:
    stream = b": keep-alive\n\nevent: message\nid: 7\ndata: one\n\nretry: 10\n\ndata: two\n\n"
    assert events([stream]) == [b"one", b"two"]


def test_data_in_several_lines_is_one_event() -> None:
    assert events([b'data: {"a":\ndata: 1}\n\n']) == [b'{"a":\n1}']


def test_an_event_without_its_end_is_not_given() -> None:
    assert events([b"data: whole\n\ndata: half\n"]) == [b"whole"]


def test_bytes_one_by_one_cost_no_more_than_once_each() -> None:
    splitter = Events()
    for _ in range(100_000):
        assert splitter.feed(b"x") == []
    assert splitter.feed(b"\n") == []
