"""A beginning of JSON says the same here as in the parser that Anthropic's SDK reads streams with."""

from __future__ import annotations

import json
from typing import Any, SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.tokens.partial_json import partial_json

jiter = pytest.importorskip("jiter")

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(value=st.dictionaries(st.text(), VALUES, max_size=4), indent=st.sampled_from([None, 1]), data=st.data())
def test_every_beginning_of_an_object_is_read_as_streaming_sdks_read_it(
    value: dict[str, Any], indent: int | None, data: st.DataObject
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=data.draw(st.booleans()))
    begun = text[: data.draw(st.integers(1, len(text)))]
    assert partial_json(begun) == jiter.from_json(begun.encode(), partial_mode=True)


@given(value=VALUES)
def test_whole_json_is_read_whole(value: Any) -> None:
    assert partial_json(f" {json.dumps(value)}\n") == value


@pytest.mark.parametrize(
    "written",
    ['"' + r"\"" * 10_000 + '"', '"' + r"\\\"" * 10_000 + '"', "[" + "false, " * 10_000 + "null]"],
    ids=["quotes", "backslashes", "constants"],
)
def test_each_character_is_read_a_few_times_however_long_the_text_is(written: str) -> None:
    text = Counting(written)
    assert partial_json(text) == json.loads(written)
    assert text.read <= 8 * len(text)


class Counting(str):
    """Counts the characters that are read of it one by one, or copied."""

    read = 0

    def __getitem__(self, at: SupportsIndex | slice) -> str:
        found = super().__getitem__(at)
        self.read += len(found)
        return found


@pytest.mark.parametrize(
    "text", ["", "  ", '"open', "-", "tru", "hello", "{a", '{"a" 1', '{"a": 1 "b"', "[1 2", "{} {", "{]"]
)
def test_what_begins_no_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|key|must"):
        partial_json(text)
