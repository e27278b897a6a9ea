"""A Step is right when it exists: what may not enter is refused by the field's name and value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.data import InvalidInput, Step
from headrace.data.packing import pack
from headrace.data.step import INT32_MAX, MAX_UID_CHARACTERS, step_from_dict


def fields(**changes: Any) -> dict[str, Any]:
    return {"prompt_ids": [1, 2, 3], "response_ids": [4, 5], "trajectory_uid": "t", **changes}


def refusal(**changes: Any) -> str:
    """The message with which a step of these fields is refused, by the Step itself or when it is packed."""
    with pytest.raises(InvalidInput) as refused:
        pack([Step(**fields(**changes))])
    return str(refused.value)


@pytest.mark.parametrize("field", ["prompt_ids", "response_ids"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "empty"),
        (np.zeros(0, np.int32), "empty"),
        ([1, -7], "[1] is -7"),
        (np.array([1, -7], np.int32), "[1] is -7"),
        (np.array([1, -7], np.int64), "[1] is -7"),
        ([2**31], "[0] is 2147483648"),
        ([5, 2**70], "[1] is 1180591620717411303424"),
        (np.array([2**31], np.uint32), "[0] is 2147483648"),
        (np.array([2**63], np.uint64), "[0] is 9223372036854775808"),
        ([1, True], "[1] must be an integer, not True"),
        ([1.5], "[0] must be an integer, not 1.5"),
        (np.array([1.0, 2.0]), "[0] must be an integer"),
        (["7"], "[0] must be an integer, not '7'"),
        ("123", "not '123'"),
        (b"123", "not b'123'"),
        (7, "not 7"),
        (None, "not None"),
        (np.ones((2, 2), np.int32), "shape (2, 2)"),
        (np.ones((2, 2), np.int64), "shape (2, 2)"),
    ],
)
def test_ids_that_are_no_ids_are_refused_by_field_and_value(field: str, value: Any, said: str) -> None:
    message = refusal(**{field: value})
    assert field in message
    assert said in message


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([-0.1], "shape (1,) for 2 response_ids"),
        ([-0.1, -0.2, -0.3], "shape (3,) for 2 response_ids"),
        ([[-0.1, -0.2]], "shape (1, 2)"),
        (["a", "b"], "['a', 'b']"),
        ("ab", "'ab'"),
        ([-0.1, float("nan")], "[1] is nan"),
        ([float("-inf"), -0.1], "[0] is -inf"),
        ([1e300, -0.1], "[0] is inf"),
        (np.array([-0.1, np.nan], np.float32), "[1] is nan"),
    ],
)
def test_log_probs_must_be_finite_and_one_a_sampled_token(value: Any, said: str) -> None:
    message = refusal(rollout_log_probs=value)
    assert "rollout_log_probs" in message
    assert said in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward", float("nan")),
        ("reward", float("inf")),
        ("reward", "1.0"),
        ("reward", True),
        ("trajectory_uid", ""),
        ("trajectory_uid", 7),
        ("trajectory_uid", "x" * (MAX_UID_CHARACTERS + 1)),
        ("trajectory_uid", "\ud800"),
        ("prompt_uid", 7),
        ("prompt_uid", "x" * (MAX_UID_CHARACTERS + 1)),
        ("step_index", -1),
        ("step_index", 1.0),
        ("step_index", True),
        ("step_index", 2**31),
        ("policy_version", -1),
        ("policy_version", 2**31),
        ("is_last", 1),
        ("is_last", "yes"),
        ("metadata", [1]),
        ("metadata", {1: 2}),
        ("metadata", None),
        ("sampling", "temperature=1"),
        ("sampling", {1: 2}),
        ("multi_modal_data", [b"image"]),
        ("finish_reason", 3),
        ("call_id", 3),
        ("quarantined", True),
        ("note", 3),
        ("trainable", 0),
        ("quality", float("nan")),
        ("quality", "good"),
        ("tags", "one"),
        ("tags", [1]),
        ("tags", None),
        ("created_at", float("nan")),
        ("created_at", "today"),
        ("routed_experts", []),
        ("routed_experts", [[-1, 2]]),
        ("routed_experts", [[0.5]]),
        ("version_spans", ((1, 3),)),
        ("version_spans", ((0, 3), (0, 4))),
        ("version_spans", ((0, 3), (2, 4))),
        ("version_spans", ()),
        ("version_spans", 5),
        ("version_spans", (1, 2)),
    ],
)
def test_every_other_field_is_refused_by_its_name_and_value(field: str, value: Any) -> None:
    message = refusal(**{field: value})
    assert field in message
    shown = repr(value) if not isinstance(value, float) else str(value)
    assert shown[:40] in message


@pytest.mark.parametrize("value", [object(), 1 + 2j, 2**70])
def test_metadata_that_no_frame_can_carry_is_refused(value: Any) -> None:
    assert "metadata" in refusal(metadata={"key": value}) or type(value).__name__ in refusal(metadata={"key": value})


def test_a_version_span_of_a_version_that_cannot_be_is_refused() -> None:
    message = refusal(version_spans=((0, -3),))
    assert "version_spans" in message
    assert "-3" in message


def test_metadata_is_bounded() -> None:
    assert "at most" in refusal(metadata={"page": "x" * (1 << 20)})


def test_one_bad_step_refuses_its_whole_batch_and_says_so() -> None:
    good = fields(step_index=0)
    for bad in (fields(response_ids=[]), fields(prompt_ids=np.array([-1], np.int32))):
        with pytest.raises(InvalidInput, match=r"^step 1: .*; none of the 3 steps was taken$"):
            pack([good, bad, good] if bad["response_ids"] == [] else [Step(**good), Step(**bad), Step(**good)])


def test_a_built_step_holds_int32_ids_and_float32_log_probs() -> None:
    step = Step(**fields(rollout_log_probs=[-0.5, -0.25], step_index=np.int64(3), reward=np.float32(0.5)))
    assert step.prompt_ids.dtype == step.response_ids.dtype == np.int32
    assert step.rollout_log_probs.dtype == np.float32
    assert type(step.step_index) is int
    assert type(step.reward) is float


def test_arrays_of_the_right_type_are_taken_as_they_are() -> None:
    ids = np.array([1, INT32_MAX], np.int32)
    assert Step(**fields(prompt_ids=ids)).prompt_ids is ids


def test_a_strided_array_is_made_contiguous() -> None:
    step = Step(**fields(prompt_ids=np.arange(10, dtype=np.int32)[::2]))
    assert step.prompt_ids.flags.c_contiguous
    assert step.prompt_ids.tolist() == [0, 2, 4, 6, 8]


def test_a_step_without_a_prompt_uid_is_a_group_of_its_own() -> None:
    assert Step(**fields()).prompt_uid == "t"


@pytest.mark.parametrize(("most", "dtype"), [(7, np.uint8), (255, np.uint8), (256, np.uint16), (70_000, np.uint32)])
def test_routed_experts_are_kept_in_the_narrowest_type(most: int, dtype: type) -> None:
    experts = Step(**fields(routed_experts=[[0, most], [1, 2]])).routed_experts
    assert experts.dtype == dtype
    assert experts.tolist() == [[0, most], [1, 2]]


def test_steps_are_equal_by_value_and_type() -> None:
    assert Step(**fields(metadata={"a": np.array([1])})) == Step(**fields(metadata={"a": np.array([1])}))
    assert Step(**fields()) != Step(**fields(response_ids=[4, 6]))
    assert Step(**fields(reward=1.0)) != Step(**fields())


def test_a_dict_becomes_a_step_and_back() -> None:
    step = Step(**fields(rollout_log_probs=[-0.5, -0.25], tags=["a"], routed_experts=[[1]]))
    assert step.tags == ("a",)
    again = step_from_dict(step.to_dict())
    assert again == step
    assert step_from_dict({**fields(), "prompt_uid": None, "metadata": None, "is_last": None}) == Step(**fields())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({**fields(), "responce_ids": [1]}, "'responce_ids'"),
        ({"prompt_ids": [1], "response_ids": [1]}, "trajectory_uid"),
        ({"prompt_ids": [1], "trajectory_uid": "t"}, "response_ids"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_a_dict_with_a_missing_or_unknown_field_names_it(given: Any, said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        step_from_dict(given)
    assert said in str(refused.value)


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels - 1):
        found = {"in": found}
    return found


def test_metadata_nests_a_hundred_levels_and_no_more() -> None:
    given = {"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "t"}
    assert Step(**given, metadata=nested(100)).metadata == nested(100)
    with pytest.raises(InvalidInput, match="metadata nests deeper than 100 levels"):
        Step(**given, metadata=nested(102))
