"""The token tree holds each token once and gives every prompt back exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.data.kit import histories, insert, record_of, tree_of

from headrace.data import Step, TokenTree
from headrace.data.block import TOKEN_BYTES, StepHead, ids_array
from headrace.data.tree import FEW


def stored(tree: TokenTree) -> int:
    return sum(len(record.ids) for record in tree.records.values()) // TOKEN_BYTES


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def whole(step: Step) -> list[int]:
    return [*step.prompt_ids.tolist(), *step.response_ids.tolist()]


@given(histories(tokens=3), st.randoms(use_true_random=False))
def test_every_prompt_is_given_back_in_any_order_of_arrival(steps: list[Step], random: object) -> None:
    arrived = list(steps)
    random.shuffle(arrived)  # type: ignore[attr-defined]
    tree = tree_of(arrived)
    for step in steps:
        index = step.step_index
        assert index is not None
        assert ids_array(tree.prompt(index)).tolist() == step.prompt_ids.tolist()
        assert ids_array(tree.whole(index)).tolist() == whole(step)
        assert ids_array(tree.tail(index, TOKEN_BYTES)).tolist() == whole(step)[1:]
        assert tree.records[index].end == len(whole(step))


@given(histories(tokens=3))
def test_a_prompt_keeps_the_longest_run_that_is_there(steps: list[Step]) -> None:
    tree = TokenTree()
    for at, step in enumerate(steps):
        prompt = step.prompt_ids.tolist()
        head = insert(tree, step).head
        assert head.keep == max((common(prompt, whole(other)) for other in steps[:at]), default=0)
        assert (head.base >= 0) == (head.keep > 0)
        if head.keep:
            assert prompt[: head.keep] == whole(steps[head.base])[: head.keep]


@dataclass
class Elsewhere:
    """Arrays that are not in memory, and how often they were read."""

    ids: bytes
    log_probs: bytes
    fingerprint: int = 0
    reads: int = 0

    def read(self, head: StepHead) -> tuple[bytes, bytes]:
        self.reads += 1
        return self.ids, self.log_probs


@given(
    st.lists(st.lists(st.integers(1, 2 * FEW), min_size=1, max_size=2), min_size=4 * FEW, max_size=6 * FEW),
    st.lists(st.sampled_from(["kept", "kept in part", "taken out", "not in memory"]), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_the_longest_run_is_found_in_a_crowd_of_branches(rests: list[list[int]], fates: list[str], random: Any) -> None:
    """Whatever producers say that a step builds on, what was taken out again, and what is not in memory."""
    tree, runs = TokenTree(), dict[int, list[int]]()
    for index, rest in enumerate(rests):
        prompt, fate = [*[0] * random.randint(1, 4), *rest], random.choice(fates)
        record = record_of(Step(prompt_ids=prompt, response_ids=[5, 5], trajectory_uid="t", step_index=index))
        head = record.head
        base, keep = tree.longest_prefix(record.ids[: head.n_prompt * TOKEN_BYTES])
        assert keep == max((common(prompt, run) for run in runs.values()), default=0)
        assert not keep or prompt[:keep] == runs[base][:keep]
        if fate == "kept in part" and runs:
            base = random.choice(list(runs))
            keep = random.randint(0, common(prompt, runs[base]))
        head.base, head.keep = base, keep
        head.n_prompt -= keep
        elsewhere = Elsewhere(record.ids[keep * TOKEN_BYTES :], record.log_probs)
        record.ids_in_memory = elsewhere.ids
        if fate == "not in memory":
            record.stored = elsewhere
            record.ids_in_memory = record.log_probs_in_memory = None
        tree.add(record)
        assert elsewhere.reads == 0
        if fate == "taken out":
            tree.discard(index)
        else:
            runs[index] = [*prompt, 5, 5]


@given(histories(tokens=0))
def test_each_token_is_stored_once(steps: list[Step]) -> None:
    """Where no two calls sample alike, what is stored is the trie of all the runs of tokens: nothing twice."""
    nodes = {tuple(whole(step)[: n + 1]) for step in steps for n in range(len(whole(step)))}
    assert stored(tree_of(steps)) == len(nodes)


def test_a_growing_history_costs_its_length() -> None:
    history: list[int] = [1] * 100
    steps = []
    for turn in range(50):
        response = [2 + turn] * 10
        steps.append(Step(prompt_ids=history, response_ids=response, trajectory_uid="t", step_index=turn))
        history = [*history, *response, 1000 + turn]
    assert stored(tree_of(steps)) == len(history) - 1


def test_choices_of_one_prompt_share_it() -> None:
    tree = tree_of([Step(prompt_ids=[7] * 50, response_ids=[i], trajectory_uid="t", step_index=i) for i in range(1, 9)])
    assert stored(tree) == 50 + 8


@given(histories(tokens=2), st.randoms(use_true_random=False))
def test_records_in_order_put_a_base_before_what_builds_on_it(steps: list[Step], random: object) -> None:
    arrived = list(steps)
    random.shuffle(arrived)  # type: ignore[attr-defined]
    tree = tree_of(arrived)
    seen: set[int] = set()
    for record in tree.in_order():
        assert record.head.base < 0 or record.head.base in seen
        seen.add(record.head.step_index)
    assert seen == set(tree.records)


@given(histories(tokens=2), st.data())
def test_what_was_added_can_be_taken_out_again(steps: list[Step], data: st.DataObject) -> None:
    """A plan that is not carried out leaves a tree that finds, and keeps, what it did before."""
    cut = data.draw(st.integers(0, len(steps) - 1))
    tree, other = tree_of(steps[:cut]), tree_of(steps[:cut])
    for step in steps[cut:]:
        insert(tree, step)
    for step in reversed(steps[cut:]):
        assert step.step_index is not None
        tree.discard(step.step_index)
    assert tree.records.keys() == other.records.keys()
    for step in steps:
        prompt = record_of(step).ids[: len(step.prompt_ids) * TOKEN_BYTES]
        assert tree.longest_prefix(prompt) == other.longest_prefix(prompt)


def test_a_producers_own_reference_may_reach_past_its_base() -> None:
    """A base's own prompt may itself be kept from another: a path is followed down to the root."""
    tree = tree_of(
        [
            Step(prompt_ids=[1, 2, 3, 4], response_ids=[5], trajectory_uid="t", step_index=0),
            Step(prompt_ids=[1, 2, 3, 4, 5, 6], response_ids=[7], trajectory_uid="t", step_index=1),
        ]
    )
    record = record_of(Step(prompt_ids=[9], response_ids=[8], trajectory_uid="t", step_index=2))
    record.head.base, record.head.keep = 1, 2
    tree.add(record)
    assert ids_array(tree.whole(2)).tolist() == [1, 2, 9, 8]
