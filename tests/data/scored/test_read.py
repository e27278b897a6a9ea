"""A posted group is kept as it was sent, or refused with the name of what is wrong."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.scored.groups import body, exact, groups, large

from headrace.data import InvalidInput
from headrace.data.scored import (
    KEYS,
    decode,
    inflate,
    read_group,
    read_groups,
    values,
)

SMALL = {"tokens": [[1, 2], [3, 4]], "masks": [[-100, 2], [-100, 4]], "scores": [0.5, 1.5]}


@given(group=groups(), compact=st.booleans())
def test_what_was_sent_is_what_is_served(group: dict[str, Any], compact: bool) -> None:
    found = read_group(body(group, compact))
    served = decode(found.piece)
    assert exact(served) == exact(group)
    assert (found.sequences, found.env_id) == (len(group["tokens"]), group["env_id"])


@given(group=groups(), junk=st.text(), order=st.randoms(use_true_random=False))
def test_absent_fields_are_null_and_unknown_ones_dropped(group: dict[str, Any], junk: str, order: Any) -> None:
    sent = [(key, value) for key, value in group.items() if value is not None] + [(f"x{junk}", {"tokens": [junk]})]
    order.shuffle(sent)
    assert exact(decode(read_group(body(dict(sent))).piece)) == exact(group)


def test_large_groups_are_served_in_the_very_text_that_came() -> None:
    group = large(1, env_id=3)
    sent = body(group)
    assert read_group(sent).piece.size < len(sent)
    assert json.dumps(group["inference_logprobs"]).encode() in inflate(read_group(sent).piece)


NUMBERS = st.sampled_from(
    [
        "0",
        "1",
        "-1",
        "12",
        "1.0",
        "1.5",
        "-0.0",
        "1e-5",
        "1.5e-05",
        "1e5",
        "1E2",
        "1e+2",
        "1e999",
        "9" * 320,
        "true",
        '"3"',
        "null",
    ]
)
TEXTS = st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"))


@settings(max_examples=500)
@given(text=TEXTS, depth=st.sampled_from([1, 2, 3]))
def test_only_nested_lists_of_one_kind_of_number_are_plain(text: str, depth: int) -> None:
    def kinds(value: Any, depth: int) -> set[type]:
        if depth and isinstance(value, list):
            return {kind for item in value for kind in kinds(item, depth - 1)} or {int, float}
        return {list} if depth else {type(value)}

    found = kinds(json.loads(text), depth)
    for shape, kind in (
        (values.plain_ints(text.encode(), depth), int),
        (values.plain_floats(text.encode(), depth), float),
    ):
        assert shape is None or found <= {kind} or found == {int, float}
        assert shape is None or ("999" not in text)


@given(
    rows=st.lists(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2), min_size=1),
    compact=st.booleans(),
)
def test_plain_floats_are_told_with_the_lengths_of_their_lists(rows: list[list[float]], compact: bool) -> None:
    text = json.dumps(rows, separators=(",", ":") if compact else None)
    large = "e+" in text
    assert values.plain_floats(text.encode(), 2) == (None if large else tuple(map(len, rows)))


@given(rows=st.lists(st.lists(st.integers(-(2**63), 2**63), min_size=2), min_size=1), compact=st.booleans())
def test_plain_ints_are_told_with_the_lengths_of_their_lists(rows: list[list[int]], compact: bool) -> None:
    text = json.dumps(rows, separators=(",", ":") if compact else None)
    assert values.plain_ints(text.encode(), 2) == tuple(map(len, rows))


@pytest.mark.parametrize(
    "text", ["[[1, 2], 3]", "[3, [1, 2]]", "[[1, 2], []]", "[[1, 2], [[3, 4]]]", "[[1, 2.0]]", "7"]
)
def test_what_is_not_a_list_of_lists_of_integers_is_not_plain(text: str) -> None:
    assert values.plain_ints(text.encode(), 2) is None


def test_python_style_numbers_are_taken() -> None:
    sent = {"tokens": [["12", 1.0, True, " 7 ", "3.0"]], "masks": [["-100", -100.0, False, 7, 3]], "scores": ["0.5"]}
    found = read_group(body({**sent, "advantages": [[1, "2", True, "-1e-3", 0]], "env_id": "4"}))
    served = decode(found.piece)
    assert exact(served["tokens"]) == "[[12, 1, 1, 7, 3]]"
    assert exact(served["masks"]) == "[[-100, -100, 0, 7, 3]]"
    assert exact(served["advantages"]) == "[[1.0, 2.0, 1.0, -0.001, 0.0]]"
    assert exact([served["scores"], served["env_id"], found.env_id]) == "[[0.5], 4, 4]"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tokens": [[1, 1.5], [3, 4]]}, r"tokens\[0\]\[1\] must be an integer, not 1.5"),
        ({"masks": [[1, 2], [3, None]]}, r"masks\[1\]\[1\] must be an integer, not None"),
        ({"tokens": [[1, 2], [3, "0x10"]]}, r"tokens\[1\]\[1\] must be an integer, not '0x10'"),
        ({"tokens": [[1, 10**301], [3, 4]]}, r"tokens\[0\]\[1\] is an integer of more than 300 digits"),
        ({"tokens": [1, 2]}, r"tokens\[0\] must be a list, not 1"),
        ({"tokens": [], "masks": [], "scores": []}, "tokens is empty"),
        ({"tokens": None}, "tokens is missing"),
        ({"scores": [0.5]}, "scores has 1 entries for 2 sequences"),
        ({"masks": [[1, 2]]}, "masks has 1 entries for 2 sequences"),
        ({"masks": [[1, 2], [3]]}, r"masks\[1\] has 1 entries for 2 tokens"),
        ({"scores": [0.5, "x"]}, r"scores\[1\] must be a number, not 'x'"),
        ({"scores": [0.5, "nan"]}, r"scores\[1\] is NaN or infinite; it must be a finite number"),
        ({"scores": [0.5, float("nan")]}, r"scores\[1\] is NaN or infinite; it must be a finite number"),
        ({"ref_logprobs": [[0.5, float("-inf")]]}, r"ref_logprobs\[0\]\[1\] is NaN or infinite"),
        ({"advantages": [[10**400]]}, r"advantages\[0\]\[0\] is NaN or infinite"),
        ({"images": [{"a": float("nan")}]}, r"images\[0\].a is NaN or infinite"),
        ({"messages": [[{"role": "user"}]]}, r"messages\[0\]\[0\] has no content"),
        ({"messages": [["?"]]}, r"messages\[0\]\[0\] must be an object, not '\?'"),
        ({"generation_params": []}, "generation_params must be an object"),
        ({"overrides": {}}, "overrides must be a list"),
        ({"env_id": 2**63}, "env_id is 9223372036854775808, which is out of range"),
        ({"distill_logprobs": [[["x"]]]}, r"distill_logprobs\[0\]\[0\]\[0\] must be a number"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_group(body({**SMALL, **changed}))


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b'{"tokens": [[1', "is not JSON"),
        (b"", "is not JSON"),
        (b"[]", "must be an object with tokens, masks and scores"),
        (b"{}", "tokens is missing"),
        (
            b'{"scores": [], "masks": [], "tokens": [], "images": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "nested more than 100 deep",
        ),
        (b'{"tokens": ' + b"[" * 100_000, "nested more than 100 deep"),
        (b'{"images": "' + b'\\"' * 100_000, "is not JSON"),
        (
            b'{"images": "\xff", "tokens": [[1]], "masks": [[1]], "scores": [0.5]}',
            "images holds a string that is no UTF-8",
        ),
        (b'{"images": "\\ud800 alone"}', "is not JSON"),
        (
            b'{"scores": [], "masks": [], "tokens": [[' + b"9" * 5000 + b"]]}",
            "tokens cannot be read: Exceeds the limit",
        ),
    ],
)
def test_hostile_bodies_are_refused(sent: bytes, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        read_group(sent)


@pytest.mark.parametrize("depth", [99, 100])
def test_a_hundred_levels_are_taken_and_no_more(depth: int) -> None:
    nested: Any = "[{" * 200  # brackets in a string are none
    for _ in range(depth):
        nested = [nested]
    read_group(body({**SMALL, "images": nested}))
    with pytest.raises(InvalidInput, match="images is nested more than 100 deep"):
        read_group(body({**SMALL, "images": [[nested]]}))


def test_a_number_that_is_none_in_a_field_that_nobody_reads_is_dropped() -> None:
    assert set(decode(read_group(body({**SMALL, "more": [float("nan"), 'NaN "NaN"']})).piece)) == set(KEYS)


def test_a_list_is_taken_whole_or_not_at_all() -> None:
    assert [one.env_id for one in read_groups(body([SMALL, {**SMALL, "env_id": 7}]))] == [None, 7]
    assert read_groups(b" [] ") == []
    with pytest.raises(InvalidInput, match=r"group 1: scores\[0\] must be a number"):
        read_groups(body([SMALL, {**SMALL, "scores": ["x", 1.0]}]))
    with pytest.raises(InvalidInput, match="must be an array of groups"):
        read_groups(body(SMALL))


def test_reading_makes_no_object_of_a_token() -> None:
    """Memory of a few texts: with a Python object a number it would be ten times that."""
    sent = body(large(1, tokens=20_000))
    read_group(sent)
    tracemalloc.start()
    try:
        read_group(sent)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 5 * len(sent)
