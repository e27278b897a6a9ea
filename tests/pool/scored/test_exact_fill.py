"""Which groups the next batch takes: packs where the sizes allow it, else by age."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pool.scored.naive import Line, lines, oldest_fill, packs, posted, queued

from headrace.data.errors import InvalidInput
from headrace.pool.scored import exact_fill
from headrace.pool.scored.batching import Batching
from headrace.pool.scored.subset_sums import plan

# -- packs: sizes divide the largest, and the largest the batch --------------------------------------------------------


@given(lines([1, 2, 4], longest=40), st.sampled_from([4, 8, 16]))
def test_batches_are_those_of_the_contracts_words(line: Line, batch_size: int) -> None:
    batching, left = queued(line), posted(line)
    for _ in range(8):
        expected, worth = packs(left, batch_size), sum(group.size for group in left)
        if expected is None and worth >= 2 * batch_size:
            return  # stuck: filled by age
        if left and batch_size % max(group.size for group in left):
            return
        assert batching.take(batch_size) == expected
        left = [group for group in left if group.number not in (expected or ())]


def test_a_pack_leaves_when_it_is_full_even_if_its_first_group_is_older() -> None:
    batching = queued([(0, 1), (1, 4), (1, 4), (0, 1), (0, 1), (0, 1)])
    assert batching.take(8) == [1, 2]


def test_groups_of_different_environments_share_a_pack() -> None:
    assert queued([(0, 2), (1, 4), (2, 2)]).take(8) == [1, 0, 2]


def test_too_few_full_packs_are_not_a_batch() -> None:
    assert queued([(0, 4), (1, 2), (2, 1), (2, 1)]).take(8) is None


def test_two_batches_worth_in_packs_that_are_not_full_are_filled_by_age() -> None:
    not_full = [(0, 6)] + [(0, 4)] * 2 + [(0, 3)] * 3 + [(0, 2)] * 5
    assert queued([*not_full, (1, 12)]).take(24) is None
    batching = queued(not_full + [(0, 1)] * 11 + [(1, 12)])
    assert batching.take(24) == [0, 1, 2, 3, 4, 5, 11]
    assert batching.take(24) is None


def test_a_group_that_its_size_leaves_alone_is_served_after_sixteen_batches() -> None:
    batching = queued([(0, 4), (1, 2), (1, 2)] + [(2, 8)] * 40)
    batches = [batching.take(16) or [] for _ in range(17)]
    assert all(not {0, 1, 2} & set(batch) for batch in batches[:16])
    assert batches[16][:3] == [0, 1, 2]


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(InvalidInput, match="batch_size must be at least 1, not 0"):
        queued([(0, 1)]).take(0)


# -- by age ------------------------------------------------------------------------------------------------------------


@given(lines([1, 2, 3, 4, 5, 6, 7], longest=9), st.integers(3, 14))
def test_an_irregular_queue_gives_the_oldest_exact_fill(line: Line, batch_size: int) -> None:
    fitting = [group for group in posted(line) if group.size <= batch_size]
    if not exact_fill.packs_fit([group.size for group in fitting], batch_size):
        assert queued(line).take(batch_size) == oldest_fill(fitting, batch_size)


@given(
    lines([1, 2, 3, 4, 6], longest=9),
    st.integers(4, 16),
    st.dictionaries(st.integers(0, 3), st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=3),
)
def test_shares_are_honoured_whenever_they_can_be(line: Line, batch_size: int, shares: dict[int, float]) -> None:
    scale = max(1.0, sum(shares.values()))
    minimums = {env: int(batch_size * (share / scale)) for env, share in shares.items()}
    fitting = [group for group in posted(line) if group.size <= batch_size]
    if any(minimums.get(group.env or 0) for group in fitting):
        assert queued(line, shares).take(batch_size) == oldest_fill(fitting, batch_size, minimums)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.dictionaries(st.integers(1, 9), st.integers(0, 5))), max_size=3),
    st.integers(0, 40),
)
def test_a_plan_keeps_to_its_target_its_needs_and_what_is_there(
    supplies: list[tuple[int, dict[int, int]]], target: int
) -> None:
    needs, counts = [need for need, _ in supplies], [each for _, each in supplies]
    taken = plan(target, needs, counts)
    if taken is not None:
        totals = [sum(size * times for size, times in parts.items()) for parts in taken]
        assert sum(totals) == target
        assert all(total >= need for total, need in zip(totals, needs, strict=True))
        assert all(
            times <= have[size] for parts, have in zip(taken, counts, strict=True) for size, times in parts.items()
        )


def test_a_group_larger_than_the_batch_stalls_nobody() -> None:
    assert queued([(0, 16), (1, 4), (1, 4)]).take(8) == [1, 2]


def test_sizes_that_do_not_divide_the_largest_stall_nobody() -> None:
    batching = queued([(0, 2), (1, 3), (0, 2), (1, 3), (0, 2)])
    assert [batching.take(6), batching.take(6)] == [[0, 2, 4], [1, 3]]


def test_a_largest_size_that_does_not_divide_the_batch_stalls_nobody() -> None:
    assert queued([(0, 5), (1, 1), (1, 1), (1, 1)]).take(8) == [0, 1, 2, 3]


def test_an_oldest_group_that_fits_no_full_batch_is_passed_over() -> None:
    assert queued([(0, 3), (1, 4), (1, 4)]).take(8) == [1, 2]


def test_a_batch_that_is_worth_no_more_plans_is_still_exact() -> None:
    # Age alone asks for a new plan at nearly every group: 7s and 11s in turn, with few ways to make 700 of them.
    line = [(0, 7 if number % 2 else 11) for number in range(160)]
    batching, sizes = queued(line), dict(enumerate(size for _, size in line))
    batch = batching.take(700)
    assert batch is not None
    assert sum(sizes[number] for number in batch) == 700
    assert batch[0] == 0


def test_a_plan_does_not_depend_on_the_order_in_which_lanes_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_fill, "SUPPLIES_PLANNED", 0)
    monkeypatch.setattr(exact_fill, "MIN_PLANS", 0)  # the first plan is the batch
    state = queued([(number % 3, (5, 7, 9)[number % 3]) for number in range(90)]).state()
    turned = {**state, "queued": state["queued"][::-1]}
    for batch_size in range(60, 90):
        assert Batching.restored(turned).take(batch_size) == Batching.restored(state).take(batch_size)


def test_shares_that_are_no_whole_groups_need_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_fill, "meetable", lambda *_: pytest.fail("a plan was made"))
    batching = queued([(number % 3, 8) for number in range(60)], {0: 0.33, 1: 0.33, 2: 0.33})
    envs = [number % 3 for number in batching.take(128) or []]  # 42 sequences each: six groups, six, and what is left
    assert [envs.count(env) for env in range(3)] == [6, 6, 4]
