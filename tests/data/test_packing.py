"""Steps survive their packed form, field by field and bit for bit; what is no block is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.kit import steps

from headrace.data import Step, frame
from headrace.data.block import (
    TOKEN_BYTES,
    Block,
    BlockHeader,
    StepHead,
    read_block,
)
from headrace.data.errors import FrameError, InvalidInput
from headrace.data.packing import check_heads, check_values, pack, unpack


def sent(block: Block) -> Block:
    """A block after a journey in a frame."""
    data = frame.frame_bytes(frame.FrameKind.MESSAGE, msgspec.msgpack.encode(block.header()), block.body())
    found = frame.decode(data)
    return read_block(msgspec.msgpack.decode(found.header, type=BlockHeader), found.body)


def unpacked(block: Block) -> list[Step]:
    return [unpack(record, record.ids[: record.head.n_prompt * TOKEN_BYTES], block.blobs) for record in block.records()]


def step(**fields: Any) -> Step:
    return Step(**{"prompt_ids": [1, 2], "response_ids": [3, 4], "trajectory_uid": "t", **fields})


@given(st.lists(steps(), max_size=5))
def test_steps_come_back_as_they_were(given_steps: list[Step]) -> None:
    block = sent(pack(given_steps))
    assert unpacked(block) == given_steps
    check_heads(block)
    check_values(block)


@given(st.lists(steps(), max_size=5))
def test_packing_again_gives_the_same_bytes(given_steps: list[Step]) -> None:
    first = pack(given_steps)
    again = pack(unpacked(sent(first)))
    assert b"".join(again.body()) == b"".join(first.body())
    assert again.header() == first.header()


@given(st.lists(steps(), min_size=1, max_size=5))
def test_records_put_together_again_are_the_same_block(given_steps: list[Step]) -> None:
    block = pack(given_steps)
    again = Block.of(block.records(), block.blobs)
    assert (again.header(), b"".join(again.body())) == (block.header(), b"".join(block.body()))


def test_ids_and_log_probs_lie_raw_and_little_endian_in_the_body() -> None:
    block = pack([step(rollout_log_probs=[-0.5, -0.25]), step(response_ids=[5])])
    assert block.body()[0] == np.array([1, 2, 3, 4, 1, 2, 5], "<i4").tobytes()
    assert block.body()[1] == np.array([-0.5, -0.25], "<f4").tobytes()


def test_a_blob_that_several_steps_share_is_sent_once() -> None:
    image = bytes(range(256)) * 40
    experts = np.zeros((50, 8), np.int64)
    block = pack(
        [
            step(multi_modal_data={"image": image, "again": [image]}, routed_experts=experts, step_index=i)
            for i in range(5)
        ]
    )
    assert sorted(map(len, block.blobs.values())) == [400, len(image)]  # uint8: narrowed
    for found in unpacked(sent(block)):
        assert found.multi_modal_data == {"image": image, "again": [image]}
        assert np.array_equal(found.routed_experts, experts)


def test_what_a_scored_groups_metadata_says_at_length_is_a_blob() -> None:
    said = {"scored_group": True, "overrides": {"a": 1}, "advantages": [0.1] * 10_000, "images": ["x" * 2_000_000]}
    block = pack([step(metadata=said, step_index=i) for i in range(3)])
    assert len(block.blobs) == 2
    assert all(len(head.extra) < 1000 for head in block.heads)
    check_heads(sent(block))
    for found in unpacked(sent(block)):
        assert found.metadata == said
    block.blobs.clear()
    assert unpacked(block)[0].metadata == {**said, "advantages": None, "images": None}, "they were lost"
    with pytest.raises(InvalidInput, match="at most 1048576 a step"):
        pack([step(metadata={"images": said["images"]})])


def test_a_value_of_metadata_that_cannot_be_read_is_refused() -> None:
    block = pack([step(metadata={"scored_group": True, "images": "x" * 100_000})])
    [digest] = block.blobs
    block.blobs[digest] = b"\xc1"
    with pytest.raises(InvalidInput, match="step 0: a value of a step's metadata cannot be read"):
        check_heads(block)


def test_a_step_whose_blob_was_lost_reads_without_it() -> None:
    block = pack([step(multi_modal_data={"image": b"gone", "size": 4})])
    block.blobs.clear()
    assert unpacked(block)[0].multi_modal_data == {"image": None, "size": 4}


def test_what_looks_like_a_reference_to_a_blob_is_kept_as_data() -> None:
    media = {"$blob": b"0123456789abcdef", "inner": {"$blob": "text"}}
    assert unpacked(sent(pack([step(multi_modal_data=media)])))[0].multi_modal_data == media


def test_unpacked_arrays_are_views_that_cannot_be_written() -> None:
    found = unpacked(sent(pack([step(rollout_log_probs=[-0.5, -0.25])])))[0]
    for array in (found.prompt_ids, found.response_ids, found.rollout_log_probs):
        assert not array.flags.writeable


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_prompt": 3}, "bytes of ids"),
        ({"n_response": 3}, "bytes of ids"),
        ({"n_prompt": 5, "n_response": -1}, "negative"),
        ({"keep": -1}, "negative"),
        ({"keep": 1}, "builds on 1 tokens of no step"),
        ({"has_log_probs": True}, "log-probs"),
    ],
)
def test_a_block_whose_lengths_do_not_add_up_is_refused(change: dict[str, Any], said: str) -> None:
    block = pack([step()])
    header = block.header()
    for name, value in change.items():
        setattr(header.heads[0], name, value)
    with pytest.raises(FrameError, match=said):
        read_block(header, memoryview(b"".join(block.body())))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trajectory_uid": ""}, "trajectory_uid"),
        ({"prompt_uid": "x" * 1000}, "prompt_uid"),
        ({"step_index": -2}, "step_index"),
        ({"step_index": 2**40}, "step_index"),
        ({"policy_version": -5}, "policy_version"),
        ({"created_at": float("nan")}, "created_at"),
        ({"reward": float("inf")}, "reward is inf"),
        ({"keep": 3}, "keep is 3 with base -1"),
        ({"base": -4}, "base -4"),
        ({"extra": b"\x01"}, "extra"),
        ({"extra": msgspec.msgpack.encode({"finish_reason": 7})}, "extra"),
        ({"extra": msgspec.msgpack.encode({"version_spans": [[1, 2]]})}, "version_spans"),
        ({"blobs": (b"short",)}, "blobs"),
    ],
)
def test_a_head_from_another_process_is_checked_like_a_step(change: dict[str, Any], said: str) -> None:
    block = pack([step(), step()])
    for name, value in change.items():
        setattr(block.heads[1], name, value)
    with pytest.raises(InvalidInput) as refused:
        check_heads(block)
    assert str(refused.value).startswith("step 1: ")
    assert said in str(refused.value)
    assert "none of the 2 steps was taken" in str(refused.value)


def test_a_response_without_tokens_cannot_be_smuggled_in() -> None:
    head = StepHead("t", "p", 2, 0, False)
    with pytest.raises(InvalidInput, match="n_response"):
        check_heads(Block([head], bytes(8), b"", {}))


def test_unknown_fields_of_a_later_release_are_passed_over() -> None:
    """An old reader meets a head and an extra that have grown: both are read for what it knows."""
    head = pack([step(note="kept")]).heads[0]
    head.extra = msgspec.msgpack.encode({**msgspec.msgpack.decode(head.extra), "from_the_future": 1})
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(msgspec.msgpack.encode(head)), "new field"])
    found = msgspec.msgpack.decode(longer, type=StepHead)
    assert found.unpack_extra().note == "kept"
