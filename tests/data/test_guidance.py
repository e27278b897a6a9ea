"""What an environment says about tokens: read from metadata, and written back."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.data.guidance import guidance_of
from headrace.data.scored import decode, from_sequences, read_group, to_steps
from headrace.data.sequence import Sequence
from headrace.pool.embedded import DataPool

SAID: dict[str, Any] = {
    "advantages": [[0.0, 0.25, -0.5], [0.0, 1.5]],
    "ref_logprobs": [[1.0, -1.0, -2.0], [1.0, -3.0]],
    "overrides": [{}, {"set_advantage_to_zero": True}],
    "distill_token_ids": [[[], [4, 5], [6]], [[1], [4, 4]]],
    "distill_logprobs": [[[], [-0.25, -2.0], [-0.5]], [[-0.5], [-1.0, -1.0]]],
}
BODY = {"tokens": [[1, 2, 3], [1, 2]], "masks": [[-100, 2, 3], [-100, 2]], "scores": [0.0, 1.0]}


def trained_on(said: dict[str, Any]) -> list[Sequence]:
    """A group's sequences as a trainer gets them from a pool, where its environment said this of it."""
    piece = read_group(msgspec.json.encode({**BODY, **said})).piece
    with DataPool(channels={"train": {"n_rollouts": 2}}) as pool:
        pool.submit_steps(to_steps(piece, "p"))
        batch = pool.fetch_batch(1, timeout=0)
    assert batch is not None
    return batch.sequences()


def test_it_is_on_the_sequences_and_goes_back_as_it_came() -> None:
    first, second = trained_on(SAID)
    assert first.guidance is not None
    assert first.guidance.advantages is not None
    assert first.guidance.advantages.tolist() == [0.0, 0.25, -0.5]
    assert first.guidance.teacher_ids is not None
    assert first.guidance.teacher_ids.tolist() == [[-1, -1], [4, 5], [6, -1]]
    assert second.guidance is not None
    assert (first.guidance.zero_advantage, second.guidance.zero_advantage) == (False, True)
    back = decode(from_sequences([first, second]).piece)
    assert {key: back[key] for key in SAID} == {**SAID, "distill_token_ids": [[[], [4, 5], [6]], [[1], [4]]]} | {
        "distill_logprobs": [[[], [-0.25, -2.0], [-0.5]], [[-0.5], [-1.0]]]
    }


@pytest.mark.parametrize(
    "said",
    [
        {"advantages": [0.5]},
        {"ref_logprobs": [0.5, 0.5, 0.5, 0.5]},
        {"distill_token_ids": [[1]], "distill_logprobs": [[-1.0]]},
        {"distill_token_ids": [[1], [1], [1]], "distill_logprobs": [[-1.0], [-1.0], []]},
    ],
)
def test_what_is_not_one_a_token_is_said_to_be_so(said: dict[str, Any]) -> None:
    found = guidance_of({**said, "scored_group": True}, 3)
    assert found is not None
    assert next(iter(said)).partition("_")[0] in found.misfit


@pytest.mark.parametrize("token", [2**32 - 1, -(2**31) - 1, 2**63, 10**20])
def test_a_teachers_token_that_no_vocabulary_has_is_said_to_be_so_and_the_batch_goes_on(token: int) -> None:
    said = {"distill_token_ids": [[[4], [5], [token]], [[1], [2]]], "distill_logprobs": [[[-0.5]] * 3, [[-0.5]] * 2]}
    first, second = trained_on(said)
    assert first.guidance is not None
    assert "distill_token_ids" in first.guidance.misfit
    assert second.guidance is not None
    assert (second.guidance.misfit, second.guidance.teacher_ids is None) == ("", False)
    assert decode(from_sequences([first, second]).piece)["scores"] == BODY["scores"]


@pytest.mark.parametrize(
    "said",
    [
        {"advantages": 0.5},
        {"advantages": [10**400] * 3},
        {"advantages": [[1.0], [1.0], [1.0]]},
        {"ref_logprobs": {"a": 1, "b": 2, "c": 3}},
        {"distill_token_ids": [1, 2, 3], "distill_logprobs": [-1.0, -1.0, -1.0]},
        {"distill_token_ids": [[[1]], [[1]], [[1]]], "distill_logprobs": [[-1.0], [-1.0], [-1.0]]},
        {"distill_token_ids": [[None], [1], [1]], "distill_logprobs": [[-1.0], [-1.0], [-1.0]]},
        {"distill_token_ids": [[1], [1], [1]], "distill_logprobs": {"a": "x", "b": "y", "c": "z"}},
    ],
    ids=lambda said: str(said)[:40],
)
def test_what_is_no_number_a_token_is_said_to_be_so(said: dict[str, Any]) -> None:
    found = guidance_of({**said, "scored_group": True}, 3)
    assert found is not None
    assert next(iter(said)) in found.misfit


@pytest.mark.parametrize("value", [1e39, -1e39, float("nan"), float("inf"), None])
@pytest.mark.parametrize("name", ["advantages", "ref_logprobs", "distill_logprobs"])
def test_what_is_not_finite_in_float32_is_said_with_its_token(name: str, value: float | None) -> None:
    given: list[Any] = [0.0, value, 0.5]
    said = {name: given, "scored_group": True}
    if name == "distill_logprobs":
        said |= {name: [[each] for each in given], "distill_token_ids": [[1]] * 3}
    found = guidance_of(said, 3)
    assert found is not None
    assert found.misfit == f"{name} is {value!r} at token 1; it must be a finite number in float32"


def test_a_score_that_only_a_double_holds_takes_its_own_sequence_and_no_other() -> None:
    first, second = trained_on({"advantages": [[0.0, 1e39, 0.5], [0.0, 1.5]]})
    assert first.guidance is not None
    assert "advantages is 1e+39 at token 1" in first.guidance.misfit
    assert second.guidance is not None
    assert second.guidance.misfit == ""


def test_a_group_may_be_set_to_zero_as_a_whole() -> None:
    found = guidance_of({"group_overrides": {"set_advantage_to_zero": True}, "scored_group": True}, 3)
    assert found is not None
    assert found.zero_advantage


@pytest.mark.parametrize("metadata", [{}, {"scored_group": True}, {"advantages": [1.0, 2.0, 3.0]}])
def test_nothing_is_said_by_nothing_or_by_a_field_of_the_same_name(metadata: dict[str, Any]) -> None:
    assert guidance_of(metadata, 3) is None
