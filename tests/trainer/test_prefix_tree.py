"""Sequences as one row in which each shared token stands once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.kit import sequence

from headrace.data.errors import InvalidInput
from headrace.trainer.backends.tensors import PackedBackend, predicting_tokens
from headrace.trainer.prefix_tree import PrefixTree, SharingRule, passes, shared_row
from headrace.trainer.tree_plan import plan_blocks, plan_calls, plan_paths, prefix_reads

ALWAYS = SharingRule(fork_tokens=-(10**6))
#: Of so few tokens that most begin alike.
ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=12)


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int32) for row in rows]


def prefixes(rows: list[list[int]]) -> int:
    """How many different tokens there are, where a token is itself and all before it."""
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


def path(tree: PrefixTree, token: int) -> list[int]:
    """The tokens of the row that precede one on its path, and itself."""
    at = int(np.searchsorted(tree.cuts, token, side="right")) - 1
    found: list[int] = []
    end = token + 1
    while at >= 0:
        found = [*range(tree.cuts[at], end), *found]
        end = tree.cuts[tree.parents[at]] + tree.shared[at]
        at = tree.parents[at]
    return found


@given(ROWS, st.integers(-50, 20), st.none() | st.integers(1, 60))
def test_every_sequence_is_a_path_of_the_row(rows: list[list[int]], fork_tokens: int, most: int | None) -> None:
    row = shared_row(arrays(rows), SharingRule(fork_tokens, most))
    for given_, places in zip(rows, row.places, strict=True):
        assert row.ids[places].tolist() == given_
        assert row.positions[places].tolist() == list(range(len(given_)))
        assert path(row.tree, int(places[-1])) == places.tolist()
    if most is not None and most >= prefixes(rows):
        assert len(row.ids) <= most


@given(ROWS)
def test_each_shared_token_stands_once(rows: list[list[int]]) -> None:
    assert len(shared_row(arrays(rows), ALWAYS).ids) == prefixes(rows)


@given(ROWS)
def test_parts_cover_what_each_token_attends_to_exactly_once(rows: list[list[int]]) -> None:
    tree = shared_row(arrays(rows), ALWAYS).tree
    wanted = [path(tree, token) for token in range(tree.cuts[-1])]
    blocks, reads = plan_blocks(tree)
    calls = [read for call in plan_calls(tree) for read in call]
    assert sorted(calls, key=repr) == sorted(prefix_reads(tree), key=repr)
    for masked, others in ((blocks, reads), (None, calls)):
        found: list[list[int]] = [[] for _ in wanted]
        for block in masked or []:
            sees = np.tri(block.end - block.begin, dtype=bool) if block.mask is None else block.mask
            for token in range(block.begin, block.end):
                found[token] += (block.begin + np.flatnonzero(sees[token - block.begin])).tolist()
        if masked is None:
            for begin, end in zip(tree.cuts[:-1], tree.cuts[1:], strict=True):
                for token in range(begin, end):
                    found[token] += range(begin, token + 1)
        for read in others:
            for token in range(*read.queries):
                found[token] += range(*read.keys)
        assert [sorted(each) for each in found] == wanted
    paths = plan_paths(tree)
    assert paths.tokens[paths.own].tolist() == list(range(tree.cuts[-1]))
    assert [len(each) for each in wanted] == [
        own - max(cut for cut in paths.cuts if cut <= own) + 1 for own in paths.own.tolist()
    ]


@given(ROWS)
def test_reads_of_one_call_have_nothing_in_common(rows: list[list[int]]) -> None:
    for call in plan_calls(shared_row(arrays(rows), ALWAYS).tree):
        for spans in ([read.queries for read in call], [read.keys for read in call]):
            tokens = [token for span in spans for token in range(*span)]
            assert len(tokens) == len(set(tokens))


def test_a_sequence_that_begins_another_and_an_equal_one_add_nothing() -> None:
    row = shared_row(arrays([[1, 2, 3], [1, 2], [1, 2, 3]]), SharingRule(fork_tokens=10**6))
    assert (row.ids.tolist(), row.tree.is_shared) == ([1, 2, 3], False)


def test_a_conversation_with_side_branches_is_one_segment_deep() -> None:
    main = list(range(100, 140))
    asides = [[*main[:at], 1, at] for at in range(1, 40, 3)]
    tree = shared_row(arrays([*asides, main]), ALWAYS).tree
    assert tree.parents == (-1, *[0] * len(asides))
    assert tree.shared[1:] == tuple(range(1, 40, 3))


@pytest.mark.parametrize(("shared", "is_shared"), [(20, True), (2, False)])
def test_a_prefix_is_shared_where_that_saves_more_than_a_fork_costs(shared: int, is_shared: bool) -> None:
    rows = [[7] * shared + [at] * 32 for at in range(2)]
    row = shared_row(arrays(rows), SharingRule(fork_tokens=8))  # 8, and 2 for merging 64 tokens
    assert row.tree.is_shared == is_shared
    assert len(row.ids) == (2 * 32 + shared if is_shared else 2 * (32 + shared))


def test_copies_are_not_made_where_the_row_would_be_too_long() -> None:
    rows = arrays([[7] * 2 + [at] * 32 for at in range(2)])
    assert len(shared_row(rows, SharingRule(fork_tokens=8, most=67)).ids) == 66
    assert len(shared_row(rows, SharingRule(fork_tokens=8, most=68)).ids) == 68


@given(ROWS, st.integers(1, 30), st.sampled_from([-(10**6), 0, 8]))
def test_a_pass_has_at_most_so_many_tokens_or_one_sequence(rows: list[list[int]], tokens: int, fork: int) -> None:
    parts = list(passes(arrays(rows), tokens))
    assert sorted(at for part in parts for at in part) == list(range(len(rows)))
    for part in parts:
        chosen = arrays([rows[at] for at in part])
        assert len(part) == 1 or len(shared_row(chosen, SharingRule(fork, tokens)).ids) <= tokens


def test_sequences_that_share_no_tokens_go_together_by_their_lengths() -> None:
    rows = [[7] * length for length in (9, 3, 12, 4, 3)]
    assert list(passes(arrays(rows), 10, sharing=False)) == [[1, 4, 3], [0], [2]]


def test_a_rank_that_no_sequence_was_dealt_to_has_no_passes() -> None:
    assert list(passes([], 25)) == []


def test_what_begins_alike_is_in_one_pass() -> None:
    rows = arrays([[at % 3] * 20 + [at] for at in range(9)])
    parts = list(passes(rows, 25))
    assert [sorted(at % 3 for at in part) for part in parts] == [[0] * 3, [1] * 3, [2] * 3]


def test_targets_are_predicted_from_the_states_of_the_tokens_before_them() -> None:
    """Also those that two sequences share, and one whose own token is not in the row."""
    batch = [sequence([(2, 4), (6, 8)], seed=0, vocabulary=1), sequence([(3, 5)], length=9, seed=0, vocabulary=1)]
    packed = PackedBackend(sharing=ALWAYS).convert(batch)
    assert packed.states.tolist() == [1, 2, 5, 6, 2, 3]
    assert packed.target_ids.tolist() == [int(one.tokens[t]) for one in batch for t in np.flatnonzero(one.loss_mask)]
    assert len(packed.ids) == 7
    assert packed.sequence.tolist() == [0] * 4 + [1] * 2
    assert torch.equal(packed.log_probs, PackedBackend().convert(batch).log_probs)


def test_tokens_from_the_last_target_on_predict_nothing() -> None:
    assert len(predicting_tokens(sequence([(2, 4)], length=9))) == 3


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        (PrefixTree((0, 2, 4), (-1, 0), (0, 3)), "3 tokens of segment 0"),
        (PrefixTree((0, 2, 4), (-1, 0), (0, 0)), "0 tokens of segment 0"),
        (PrefixTree((0, 2, 4), (1, -1), (1, 0)), "segment 0 continues"),
        (PrefixTree((0, 2, 4, 6), (-1, -1, 0), (0, 0, 1)), "segment 2 continues"),
    ],
)
def test_segments_that_do_not_hang_together_are_refused(tree: PrefixTree, named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        tree.ends()


def test_a_sequence_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidInput, match="sequence 1 has no tokens"):
        shared_row([np.ones(1, np.int32), np.empty(0, np.int32)], ALWAYS)
