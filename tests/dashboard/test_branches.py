"""What made a branch: where it leaves another, and the first message that differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.rewards.recorded import steps_of

from headrace import DataPool, Step
from headrace.dashboard.detail import conversation
from headrace.dashboard.records import BranchDifference
from headrace.demo.model import WORDS
from headrace.engine import words
from headrace.rewards.recorded import SampleReader
from headrace.tokens import Message, Renderer, load_renderer


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return load_renderer(folder)


def branched(pool: DataPool, renderer: Renderer, second: list[Message], answer: str = "four") -> None:
    """A trajectory of two turns, and a call whose prompt is another."""
    steps = steps_of(renderer, [("2 + 2?", "let me see"), ("well?", "five")], trajectory_uid="t")
    other = Step(
        prompt_ids=renderer.render(second),
        response_ids=renderer.vocabulary.encode(answer + "<|im_end|>"),
        trajectory_uid="t",
        step_index=2,
    )
    pool.submit_steps([*steps[:1], _open(steps[1]), other])


def _open(step: Step) -> Step:
    return Step(
        prompt_ids=step.prompt_ids, response_ids=step.response_ids, trajectory_uid="t", step_index=step.step_index
    )


def difference(pool: DataPool, leaf: int, reader: SampleReader | None) -> BranchDifference:
    found = conversation(pool.trajectory("t"), leaf, reader).difference
    assert found is not None
    return found


def test_the_first_message_that_differs_is_shown_as_a_diff(renderer: Renderer) -> None:
    sent = [Message("user", "2 + 2?"), Message("assistant", "let us see"), Message("user", "well?")]
    with DataPool() as pool:
        branched(pool, renderer, sent)
        found = difference(pool, 2, SampleReader(renderer))
        assert (found.other, found.message) == (1, 1)
        assert found.words == (
            "The prompt of step 2 is not what the branch to step 1 holds: "
            "message 2 (assistant) is the first that differs."
        )
        assert found.pieces == [("same", "let "), ("removed", "me"), ("added", "us"), ("same", " see")]
        assert conversation(pool.trajectory("t"), 1, SampleReader(renderer)).difference is None


def test_a_prompt_that_was_sampled_twice_is_told_from_one_that_changed(renderer: Renderer) -> None:
    sent = [Message("user", "2 + 2?"), Message("assistant", "let me see"), Message("user", "well?")]
    with DataPool() as pool:
        branched(pool, renderer, sent)
        found = difference(pool, 2, SampleReader(renderer))
        assert found.words.startswith("Step 2 was sampled from a prompt that the branch to step 1 has too:")
        assert (found.message, found.pieces) == (3, [("removed", "five"), ("added", "four")])


def test_a_history_that_was_cut_is_said(renderer: Renderer) -> None:
    with DataPool() as pool:
        branched(pool, renderer, [Message("user", "well?")])
        found = difference(pool, 2, SampleReader(renderer))
        assert found.message == 0
        assert ("added", "well") in found.pieces


def test_without_a_tokenizer_the_first_token_that_differs_is_named() -> None:
    with DataPool() as pool:
        pool.submit_steps(
            [
                Step(prompt_ids=[1, 2, 3], response_ids=[4], trajectory_uid="t", step_index=0),
                Step(prompt_ids=[1, 2, 5], response_ids=[4], trajectory_uid="t", step_index=1),
            ]
        )
        found = difference(pool, 1, None)
        assert (found.other, found.token, found.message, found.pieces) == (0, 2, None, [])
        assert found.words.endswith("they differ from token 2 on.")


def test_roles_are_roles_in_a_vocabulary_of_a_few_words(tmp_path: Path) -> None:
    small = load_renderer(words.build(tmp_path / "model", WORDS))
    turns = [("guess", "3"), ("higher", "5"), ("lower", "4")]
    with DataPool() as pool:
        pool.submit_steps(steps_of(small, turns, trajectory_uid="t"))
        found = conversation(pool.trajectory("t"), 2, SampleReader(small))
    assert found.messages is not None
    assert [(one.role, one.content) for one in found.messages] == [
        pair for said, answer in turns for pair in (("user", said), ("assistant", answer))
    ]
