"""Sequences: every sampled token is a target in exactly one of them, and everything about it lies at its place."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.data.kit import histories, tree_of

from headrace.data import Sequence, Step, Trajectory
from headrace.data.sequence import parents_of, sequences_of


def whole(step: Step) -> list[int]:
    return [*step.prompt_ids.tolist(), *step.response_ids.tolist()]


def parent(steps: list[Step], at: int) -> int:
    """By definition: the longest step whose prompt and response this one's prompt begins with; of equals the later."""
    prompt = steps[at].prompt_ids.tolist()
    fits = [i for i, other in enumerate(steps) if i != at and prompt[: len(whole(other))] == whole(other)]
    return max(fits, key=lambda i: (len(whole(steps[i])), i), default=-1)


def chain(steps: list[Step], leaf: int) -> list[int]:
    path = []
    while leaf >= 0:
        path.append(leaf)
        leaf = parent(steps, leaf)
    return path[::-1]


@st.composite
def recorded(draw: st.DrawFn, tokens: int = 2) -> list[Step]:
    """Histories with what a server and people say about each call."""
    made = []
    for step in draw(histories(tokens=tokens)):
        n = len(step.response_ids)
        changes: dict[str, Any] = {"policy_version": draw(st.integers(0, 5))}
        if draw(st.booleans()):
            changes["rollout_log_probs"] = [-0.5 * draw(st.integers(0, 8)) for _ in range(n)]
        if n > 1 and draw(st.booleans()):
            changes["version_spans"] = ((0, changes["policy_version"]), (draw(st.integers(1, n - 1)), 9))
        if draw(st.integers(0, 3)) == 0:
            changes |= draw(st.sampled_from([{"quarantined": "no log-probs"}, {"trainable": False}]))
        if draw(st.booleans()):
            changes["reward"] = float(draw(st.integers(-4, 4)))
        changes["finish_reason"] = draw(st.sampled_from([None, "stop"]))
        made.append(msgspec.structs.replace(step, **changes))
    return made


def trainable(step: Step) -> bool:
    return step.trainable and step.quarantined is None


@given(recorded())
def test_parents_are_the_longest_steps_that_a_prompt_continues(steps: list[Step]) -> None:
    assert parents_of(tree_of(steps)) == {i: parent(steps, i) for i in range(len(steps))}


@given(recorded())
def test_every_trainable_step_is_trained_in_exactly_one_sequence(steps: list[Step]) -> None:
    trained = [s.step_index for q in sequences_of(tree_of(steps), "t", "p") for s in q.spans if s.trained]
    assert sorted(trained) == [i for i, step in enumerate(steps) if trainable(step)]


@given(recorded())
def test_the_mask_is_true_exactly_where_a_trained_step_was_sampled(steps: list[Step]) -> None:
    for sequence in sequences_of(tree_of(steps), "t", "p"):
        expected = np.zeros(len(sequence), np.bool_)
        for span in sequence.spans:
            expected[span.start : span.end] = span.trained
        assert np.array_equal(sequence.loss_mask, expected)
        assert sequence.loss_mask.any()


def model(steps: list[Step]) -> list[dict[str, Any]]:
    """What the Sequences should hold, worked out from whole lists of tokens."""
    leaves = [i for i in range(len(steps)) if all(parent(steps, j) != i for j in range(len(steps)))]
    rewards = [step.reward for step in steps if step.reward is not None]
    taken: set[int] = set()
    found = []
    for leaf in leaves:
        path = chain(steps, leaf)
        fresh = {i for i in path if i not in taken and trainable(steps[i])}
        taken |= fresh
        if not fresh:
            continue
        tokens = whole(steps[leaf])
        log_probs, versions = [0.0] * len(tokens), [-1] * len(tokens)
        spans = []
        for i in path:
            step, start = steps[i], len(steps[i].prompt_ids)
            spans.append((i, start, start + len(step.response_ids), step.reward, i in fresh, step.finish_reason))
            for offset in range(len(step.response_ids)):
                given = step.rollout_log_probs
                log_probs[start + offset] = float("nan") if given is None else float(given[offset])
                version = step.policy_version
                for first, of_span in step.version_spans or ():
                    version = of_span if offset >= first else version
                versions[start + offset] = version or 0
        found.append({"tokens": tokens, "log_probs": log_probs, "versions": versions, "spans": spans})
        found[-1]["reward"] = sum(rewards) if rewards else None
    return found


@given(recorded())
def test_sequences_are_what_whole_lists_of_tokens_say(steps: list[Step]) -> None:
    found = sequences_of(tree_of(steps), "t", "p", {"task": 1})
    expected = model(steps)
    assert len(found) == len(expected)
    for sequence, wanted in zip(found, expected, strict=True):
        assert sequence.tokens.tolist() == wanted["tokens"]
        assert np.array_equal(sequence.log_probs, np.array(wanted["log_probs"], np.float32), equal_nan=True)
        assert sequence.versions.tolist() == wanted["versions"]
        spans = [(s.step_index, s.start, s.end, s.reward, s.trained, s.finish_reason) for s in sequence.spans]
        assert spans == wanted["spans"]
        assert sequence.reward == wanted["reward"]
        assert (sequence.trajectory_uid, sequence.prompt_uid, sequence.metadata) == ("t", "p", {"task": 1})


@given(recorded(), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(steps: list[Step], random: object) -> None:
    arrived = list(steps)
    random.shuffle(arrived)  # type: ignore[attr-defined]

    def plain(sequence: Sequence) -> Any:
        return sequence.tokens.tolist(), sequence.loss_mask.tolist(), sequence.versions.tolist(), sequence.spans

    assert list(map(plain, sequences_of(tree_of(arrived), "t", "p"))) == list(
        map(plain, sequences_of(tree_of(steps), "t", "p"))
    )


def turns(count: int) -> list[Step]:
    history, made = [1, 2], []
    for turn in range(count):
        response = [10 + turn, 20 + turn]
        made.append(
            Step(prompt_ids=history, response_ids=response, trajectory_uid="t", step_index=turn, reward=float(turn))
        )
        history = [*history, *response, 5]
    return made


def test_fifty_turns_that_extend_each_other_are_one_sequence() -> None:
    (sequence,) = sequences_of(tree_of(turns(50)), "t", "p")
    assert sequence.loss_mask.sum() == 100
    assert len(sequence.spans) == 50
    assert sequence.reward == sum(range(50))


def test_a_rewritten_history_makes_two_sequences_that_share_context() -> None:
    first, second = turns(2)
    rewritten = Step(prompt_ids=[1, 2, 10, 20, 6], response_ids=[30], trajectory_uid="t", step_index=2)
    one, two = sequences_of(tree_of([first, second, rewritten]), "t", "p")
    assert one.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert two.tokens.tolist() == [1, 2, 10, 20, 6, 30]
    assert two.loss_mask.tolist() == [False, False, False, False, False, True]
    assert [span.trained for span in two.spans] == [False, True]


def test_a_call_that_sampled_the_beginning_of_another_is_a_branch_of_its_own() -> None:
    """The third continues the second, though the first's answer begins the same way."""
    steps = [
        Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", step_index=0),
        Step(prompt_ids=[1], response_ids=[2, 3], trajectory_uid="t", step_index=1),
        Step(prompt_ids=[1, 2], response_ids=[3, 4], trajectory_uid="t", step_index=2),
        Step(prompt_ids=[1, 2, 3, 4, 5], response_ids=[6], trajectory_uid="t", step_index=3),
    ]
    assert parents_of(tree_of(steps)) == {0: -1, 1: -1, 2: 0, 3: 2}


def test_a_trajectory_shows_its_tree_its_reward_and_its_steps() -> None:
    steps = turns(3)
    trajectory = Trajectory("t", "p", "train", True, {}, tree_of(steps))
    assert trajectory.parents == {0: -1, 1: 0, 2: 1}
    assert trajectory.reward == 3.0
    assert [step.prompt_ids.tolist() for step in trajectory.steps] == [step.prompt_ids.tolist() for step in steps]
    assert Trajectory("t", "p", "train", False, {}, tree_of([steps[0]])).reward == 0.0
    bare = Step(prompt_ids=[1], response_ids=[2], trajectory_uid="t", step_index=0)
    assert Trajectory("t", "p", "train", False, {}, tree_of([bare])).reward is None
