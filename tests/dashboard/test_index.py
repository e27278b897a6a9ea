"""The index: what a query finds is what a scan of the rows would; its memory is bounded."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dashboard.index import TrajectoryIndex
from headrace.dashboard.name_text import NameText
from headrace.dashboard.records import TrajectoryQuery, TrajectoryRecord
from headrace.data.errors import InvalidInput

STATES = ("queued", "leased", "consumed", "stale")


def rows(count: int, seed: int = 0) -> list[TrajectoryRecord]:
    chance = random.Random(seed)
    return [
        TrajectoryRecord(
            uid=f"t{number}",
            prompt_uid=f"p{number // 4}",
            channel=chance.choice(("default", "other")),
            state=chance.choice(STATES),
            complete=chance.random() < 0.5,
            steps=chance.randint(1, 9),
            tokens=chance.randint(1, 999),
            reward=chance.choice((None, 0.0, 0.5, 1.0)),
            version=chance.randint(0, 5),
            tags=tuple(tag for tag in ("good", "bad") if chance.random() < 0.3),
        )
        for number in range(count)
    ]


def fits(row: TrajectoryRecord, asked: dict[str, Any]) -> bool:
    """The filters, as they are said in words."""
    low, high = asked.get("min_reward"), asked.get("max_reward")
    return (
        all(
            getattr(row, name) == asked[name]
            for name in ("channel", "state", "complete", "prompt_uid")
            if name in asked
        )
        and ("tag" not in asked or asked["tag"] in row.tags)
        and ("find" not in asked or asked["find"] in row.uid or asked["find"] in row.prompt_uid)
        and (low is None or (row.reward is not None and row.reward >= low))
        and (high is None or (row.reward is not None and row.reward <= high))
        and asked.get("min_version", 0) <= row.version <= asked.get("max_version", 99)
    )


FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "channel": st.sampled_from(("default", "other", "none")),
        "state": st.sampled_from((*STATES, "none")),
        "complete": st.booleans(),
        "prompt_uid": st.sampled_from(("p3", "p99999")),
        "tag": st.sampled_from(("good", "bad", "none")),
        "find": st.sampled_from(("7", "p1", "t")),
        "min_reward": st.sampled_from((0.0, 0.5)),
        "max_reward": st.sampled_from((0.5, 1.0)),
        "min_version": st.integers(0, 5),
        "max_version": st.integers(0, 5),
    },
)


@given(FILTERS)
def test_a_query_finds_what_a_scan_would(asked: dict[str, Any]) -> None:
    known = rows(60)
    index = TrajectoryIndex()
    for row in known:
        index.put(row)
    page = index.page(TrajectoryQuery(**asked, descending=False, limit=500))
    assert [row.uid for row in page.rows] == [row.uid for row in known if fits(row, asked)]
    assert page.total == len(page.rows)


@pytest.mark.parametrize("descending", [True, False])
def test_rows_without_a_value_come_last_whichever_way(descending: bool) -> None:
    index = TrajectoryIndex()
    for row in rows(40):
        index.put(row)
    found = [row.reward for row in index.page(TrajectoryQuery(sort="reward", descending=descending, limit=500)).rows]
    given_ones = [reward for reward in found if reward is not None]
    assert given_ones == sorted(given_ones, reverse=descending)
    assert found[len(given_ones) :] == [None] * (len(found) - len(given_ones))


def test_pages_together_are_the_whole_without_doubles() -> None:
    index = TrajectoryIndex()
    for row in rows(105):
        index.put(row)
    seen = [
        row.uid
        for offset in range(0, 105, 10)
        for row in index.page(TrajectoryQuery(sort="tokens", offset=offset, limit=10)).rows
    ]
    assert len(seen) == len(set(seen)) == 105


def test_a_row_that_changes_is_found_by_what_it_is_now() -> None:
    index = TrajectoryIndex()
    index.put(TrajectoryRecord("t", "p", "default", tags=("old",)))
    index.put(TrajectoryRecord("t", "p", "default", reward=1.0, tags=("new",)))
    index.retire("default", "t", "consumed")
    assert len(index) == 1
    assert index.page(TrajectoryQuery(tag="old")).total == 0
    (found,) = index.page(TrajectoryQuery(tag="new", state="consumed")).rows
    assert found.reward == 1.0


def test_beyond_its_bound_those_that_left_the_pool_go_first() -> None:
    index = TrajectoryIndex(most=10)
    for number in range(10):
        index.put(TrajectoryRecord(f"t{number}", "p", "default", tags=("x",)))
    index.retire("default", "t5", "consumed")
    index.put(TrajectoryRecord("new", "q", "default"))
    assert len(index) == 10
    assert index.evicted == 1
    assert index.get("default", "t5") is None
    assert index.get("default", "t0") is not None
    index.put(TrajectoryRecord("newer", "q", "default"))
    assert index.get("default", "t0") is None, "with none that left, the oldest goes"
    assert index.page(TrajectoryQuery(tag="x")).total == 8


def test_a_query_names_what_is_wrong_with_it() -> None:
    with pytest.raises(InvalidInput, match="sort is 'colour'; it is one of number, reward"):
        TrajectoryQuery(sort="colour")
    with pytest.raises(InvalidInput, match="limit is 0"):
        TrajectoryQuery(limit=0)


def test_a_part_of_a_name_is_found_wherever_it_stands_and_whatever_became_of_other_rows() -> None:
    names = NameText()
    for slot in range(10_000):
        names.put(slot, f"u{slot}", f"p{slot // 2}")
    assert names.find("u9999") == {9999}
    assert names.find("p4999") == {9998, 9999}
    assert names.find("u123") == {123, *range(1230, 1240)}
    names.drop(123)
    names.drop(1230)
    names.put(1230, "another", "line\nbreak")
    assert names.find("u123") == set(range(1231, 1240))
    assert names.find("e\nb") == names.find("e b") == {1230}
    assert names.find("her\nl") == set()
    assert len(names.find("p")) == 9_998


def test_pages_deep_in_a_sorted_list_are_those_of_the_whole_list() -> None:
    index = TrajectoryIndex()
    for number in range(300):
        index.put(TrajectoryRecord(f"t{number}", "p", "train", reward=None if number % 7 == 0 else float(number % 5)))
    for descending in (False, True):
        whole = index.page(TrajectoryQuery(sort="reward", descending=descending, limit=500)).rows
        assert [row.reward is None for row in whole] == sorted(row.reward is None for row in whole)
        for offset in range(0, 300, 37):
            page = index.page(TrajectoryQuery(sort="reward", descending=descending, offset=offset, limit=20))
            assert page.rows == whole[offset : offset + 20]
