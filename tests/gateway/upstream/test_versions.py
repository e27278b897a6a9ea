"""Spans: which version sampled which token."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.upstream.upstream import join_spans
from headrace.gateway.upstream.wire import VersionRange, extend_spans, spans_of, version_number


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), max_size=8))
def test_spans_told_piece_by_piece_name_every_tokens_version(runs: list[tuple[int, int]]) -> None:
    spans, versions = (), []
    for tokens, version in runs:
        spans = extend_spans(spans, len(versions), version)
        versions += [version] * tokens
    assert [max((s for s in spans if s[0] <= at), default=(0, None))[1] for at in range(len(versions))] == versions
    assert all(a[1] != b[1] for a, b in pairwise(spans))


def test_the_spans_of_a_continued_answer_are_those_of_its_parts() -> None:
    assert join_spans(((0, 3),), 5, ((0, 4), (2, 5))) == ((0, 3), (5, 4), (7, 5))
    assert join_spans(((0, 3),), 5, ((0, 3),)) == ((0, 3),)
    assert join_spans((), 0, ((0, 3),)) == ((0, 3),)


def test_told_versions_become_spans() -> None:
    assert spans_of([VersionRange("7", 0, 3), VersionRange("7", 3, 4), VersionRange("8", 4, 6)], 5) == ((0, 7), (4, 8))


def test_a_version_without_a_number_is_the_one_known_before() -> None:
    assert spans_of([VersionRange("default", 0, 3), VersionRange("8", 3, 6)], 5) == ((0, 5), (3, 8))


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        [VersionRange("default", 0, 3)],
        [VersionRange("7", 1, 3)],
        [VersionRange("7", 0, 3), VersionRange("8", 4, 5)],
    ],
)
def test_versions_that_say_nothing_certain_are_not_taken(told: list[VersionRange] | None) -> None:
    assert spans_of(told, 5) == ()


@pytest.mark.parametrize(
    ("told", "number"), [("7", 7), ("007", 7), ("default", None), ("-1", None), ("٧", None), ("9" * 5000, None)]
)
def test_only_digits_are_a_version(told: str, number: int | None) -> None:
    assert version_number(told) == number
