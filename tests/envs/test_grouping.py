"""Rollouts become a group with all that they carry; what is no group is told apart, by its field."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.envs.groups import BadGroup, check_group, group_of, merge_rollouts

ITEM = {"tokens": [1, 2], "masks": [-100, 2], "scores": 0.5}
EVERYTHING = {
    "advantages": [0.0, 0.25],
    "ref_logprobs": [0.0, -0.5],
    "inference_logprobs": [1.0, -0.75],
    "messages": [{"role": "user", "content": "hello", "tool_calls": []}],
    "overrides": {"set_advantage_to_zero": True},
    "images": ["a picture"],
    "distill_token_ids": [[1, 2], [3, 4]],
    "distill_logprobs": [[-0.1, -0.2], [-0.3, -0.4]],
}


def test_every_field_of_a_rollout_is_in_the_group() -> None:
    group = group_of([{**ITEM, **EVERYTHING, "generation_params": {"temperature": 1.0}}] * 3)
    assert group == {
        **{key: [value] * 3 for key, value in (ITEM | EVERYTHING).items()},
        "generation_params": {"temperature": 1.0},
        "group_overrides": {},
    }


def test_what_only_some_rollouts_have_keeps_its_place() -> None:
    group = group_of(
        [ITEM, {**ITEM, "overrides": {"a": 1}, "images": "b", "messages": [{"role": "user", "content": "c"}]}]
    )
    assert group["overrides"] == [{}, {"a": 1}]
    assert group["images"] == [None, "b"]
    assert group["messages"] == [[], [{"role": "user", "content": "c"}]]


@pytest.mark.parametrize("field", ["advantages", "inference_logprobs", "distill_logprobs"])
def test_numbers_by_token_are_in_all_rollouts_or_in_none(field: str) -> None:
    with pytest.raises(BadGroup, match=f"{field} is in 1 of 2"):
        group_of([ITEM, {**ITEM, field: EVERYTHING[field]}])


def test_what_holds_for_a_group_is_merged_from_its_rollouts() -> None:
    first = {**ITEM, "group_overrides": {"a": 1}, "generation_params": {"n": 1}}
    group = group_of([first, {**ITEM, "group_overrides": {"b": 2}}])
    assert group["group_overrides"] == {"a": 1, "b": 2}
    assert group["generation_params"] == {"n": 1}


def test_other_things_than_scored_items_stay_a_list() -> None:
    assert merge_rollouts([("text", ["later"]), (None, []), ("more", [])]) == (["text", "more"], ["later"])
    assert merge_rollouts([(None, ["later"]), (None, [])]) == (None, ["later"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": [[1, 2]]}, "has 1 sequences, and group_size is 2"),
        ({"scores": [1.0]}, "has 2 sequences and 1 scores"),
        ({"scores": [1.0, float("nan")]}, r"scores\[1\] must be a finite number, not nan"),
        ({"scores": [1.0, None]}, r"scores\[1\] must be a finite number, not None"),
        ({"masks": [[-100, 2], [-100]]}, r"tokens\[1\] and masks\[1\]"),
        ({"tokens": "12"}, "tokens must be a list"),
        ({"group_overrides": []}, None),
        ({"group_overrides": "x"}, "group_overrides must be an object"),
        ({"group_overrides": {"group_size": 3}}, "group_size is 3"),
    ],
)
def test_what_is_no_group_is_named(change: dict[str, Any], said: str | None) -> None:
    group = {**group_of([ITEM, ITEM]), **change}
    if said is None:
        check_group(group, 2)
        return
    with pytest.raises(BadGroup, match=said):
        check_group(group, 2)
