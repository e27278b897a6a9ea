"""A group as a whole: which tokens its trajectories share, and where its best leaves its worst."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rewards.recorded import record

from headrace import DataPool
from headrace.dashboard.group_detail import group_detail, prefix_share
from headrace.rewards.recorded import SampleReader
from headrace.tokens import Renderer, load_renderer


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return load_renderer(folder)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12))
def test_the_tree_has_each_beginning_once_and_each_sequence_whole(sequences: list[list[int]]) -> None:
    found = prefix_share([(str(at), np.array(ids, np.int32)) for at, ids in enumerate(sequences)])
    beginnings = {tuple(ids[:end]) for ids in sequences for end in range(1, len(ids) + 1)}
    assert (found.computed, found.tokens) == (len(beginnings), sum(map(len, sequences)))
    for lane, uid in enumerate(found.leaves):
        own = [node for node in found.nodes if node.first <= lane < node.first + node.count]
        covered = sorted(at for node in own for at in range(node.start, node.end))
        assert covered == list(range(len(sequences[int(uid)])))


def test_the_first_message_that_differs_is_shown_of_the_best_and_the_worst(renderer: Renderer) -> None:
    with DataPool(defaults={"n_rollouts": 3}) as pool:
        for uid, answer, reward in (("a", "5", 0.0), ("b", "4", 1.0), ("c", "5", 0.5)):
            record(pool, renderer, uid, [("2 + 2?", "let me see"), ("well?", answer)], prompt_uid="p")
            pool.reward(uid, reward)
        group = [pool.trajectory(uid) for uid in "abc"]
        found = group_detail(group, SampleReader(renderer))
        assert found.difference is not None
        assert (found.difference.best, found.difference.worst) == ("b", "a")
        assert found.difference.best_message is not None
        assert found.difference.worst_message is not None
        assert (found.difference.best_message.content, found.difference.worst_message.content) == ("4", "5")
        assert found.prefix.leaves.count("a") == 1
        assert found.prefix.computed < found.prefix.tokens / 2
        assert group_detail(group[:1], None).why_none == "its rewards are all the same"
        assert group_detail(group, None).why_none == "no tokenizer is known here"
