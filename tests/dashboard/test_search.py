"""Text in trajectories: what was said, metadata and notes, a bounded while at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dashboard.test_follow import sweep
from tests.rewards.recorded import record

from headrace import DataPool, Step
from headrace.dashboard.follow import PoolFollower
from headrace.dashboard.index import TrajectoryIndex
from headrace.dashboard.records import TrajectoryQuery, TrajectoryRecord
from headrace.dashboard.search import SEARCH_S, SearchPage, search
from headrace.dashboard.source import RunningPool
from headrace.data.errors import InvalidInput
from headrace.tokens import Renderer, load_renderer


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return load_renderer(folder)


class Ticking:
    """A clock on which each question takes a tenth of what a search may."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += SEARCH_S / 10
        return self.now


def listed(pool: DataPool) -> list[TrajectoryRecord]:
    index = TrajectoryIndex()
    sweep(PoolFollower(RunningPool(pool, "here"), index))
    return index.matching(TrajectoryQuery())


def uids(page: SearchPage) -> list[str]:
    return [row.uid for row in page.rows]


def test_what_was_said_and_what_metadata_says_is_found_whatever_its_capitals(renderer: Renderer) -> None:
    with DataPool() as pool:
        record(pool, renderer, "a", [("2 + 2?", "it is Four"), ("sure?", "yes")], row={"agent": "Planner"})
        record(pool, renderer, "b", [("hello", "four and five")])
        pool.curate("b", 0, note="odd one")
        source, rows, words = RunningPool(pool, "here"), listed(pool), renderer.vocabulary
        assert uids(search(rows, "FOUR", 0, source.trajectory, words)) == ["b", "a"]
        assert uids(search(rows, "sure?", 0, source.trajectory, words)) == ["a"]
        assert uids(search(rows, "planner", 0, source.trajectory, None)) == ["a"]
        assert uids(search(rows, "odd one", 0, source.trajectory, None)) == ["b"]
        assert uids(search(rows, "four", 0, source.trajectory, None)) == []
        for text, wrong in (("", "blank"), ("  ", "blank"), ("x" * 2_000, "look for at most 1000")):
            with pytest.raises(InvalidInput, match=wrong):
                search(rows, text, 0, source.trajectory, words)


def test_metadata_whose_keys_are_no_text_is_searched() -> None:
    with DataPool() as pool:
        pool.open("a", metadata={"cells": {(1, 2): "Alpha"}})
        own = {"a": {}, "b": {"cells": {b"raw": {None: "beta"}}}}
        pool.submit_steps(
            [Step(prompt_ids=[1], response_ids=[2], trajectory_uid=u, metadata=m) for u, m in own.items()]
        )
        source, rows = RunningPool(pool, "here"), listed(pool)
        for text, uid in (("alpha", "a"), ("(1, 2)", "a"), ("beta", "b")):
            assert uids(search(rows, text, 0, source.trajectory, None)) == [uid]


def test_a_search_goes_on_where_its_time_was_over(renderer: Renderer) -> None:
    with DataPool() as pool:
        for number in range(30):
            record(pool, renderer, f"t{number}", [("hello", "seven" if number % 10 == 7 else "six")])
        source, rows, found = RunningPool(pool, "here"), listed(pool), list[str]()
        at: int | None = 0
        pages = 0
        while at is not None:
            page = search(rows, "seven", at, source.trajectory, renderer.vocabulary, Ticking())
            assert page.searched < 15
            found += uids(page)
            at, pages = page.next, pages + 1
        assert found == ["t27", "t17", "t7"]
        assert pages >= 3
