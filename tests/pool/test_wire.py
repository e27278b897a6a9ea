"""Calls and answers survive the wire; what is cut, changed or of another kind is refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.kit import OBJECTS, steps
from tests.pool.kit import fetched, group, keys, step, trajectory

from headrace import DataPool, Step
from headrace.data import frame
from headrace.data.errors import FrameError, HeadraceError, InvalidInput
from headrace.data.packing import pack
from headrace.pool.batch import Batch
from headrace.pool.config import ChannelConfig
from headrace.pool.errors import LeaseLost
from headrace.pool.operation import Completion, Receipt
from headrace.pool.state import Event
from headrace.pool.wire import decode_call, decode_reply, encode_call, encode_error, encode_reply

CALL = encode_call("submit", {"channel": "train", "timeout": None}, pack(trajectory("t", 2)))


@settings(max_examples=40)
@given(args=OBJECTS, sent=st.lists(steps(), max_size=3))
def test_a_call_arrives_as_it_was_sent(args: dict[str, Any], sent: list[Step]) -> None:
    block = pack(sent)
    op, arrived, found = decode_call(encode_call("submit", args, block))
    assert (op, arrived) == ("submit", args)
    assert found is not None
    assert (found.header(), b"".join(found.body())) == (block.header(), b"".join(block.body()))


def test_a_call_without_steps_has_none() -> None:
    assert decode_call(encode_call("stats", {"channel": None})) == ("stats", {"channel": None}, None)


@pytest.mark.parametrize("kept", [*range(0, len(CALL), 7), len(CALL) - 1])
def test_a_call_cut_anywhere_is_refused(kept: int) -> None:
    with pytest.raises(FrameError):
        decode_call(CALL[:kept])


def test_what_follows_a_message_or_is_none_is_refused() -> None:
    with pytest.raises(FrameError, match="8 bytes follow"):
        decode_call(CALL + bytes(8))
    with pytest.raises(FrameError, match="kind 2"):
        decode_call(frame.frame_bytes(frame.FrameKind.COMMIT, b""))
    with pytest.raises(FrameError, match="cannot be read"):
        decode_call(frame.frame_bytes(frame.FrameKind.MESSAGE, b"\xc0"))


def test_heads_and_values_are_checked_where_they_arrive() -> None:
    block = pack([step("t")])
    block.heads[0].reward = float("nan")
    with pytest.raises(InvalidInput, match="step 0: reward is nan"):
        decode_call(encode_call("submit", {}, block))
    block = pack([step("t")])
    block.ids = np.array([1, 2, 3, -4, 5], "<i4").tobytes()
    with pytest.raises(InvalidInput, match=r"step 0: response_ids\[0\] is -4"):
        decode_call(encode_call("submit", {}, block))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        "late",
        1.5,
        {"ledger": {"queued": 3}},
        [],
        Receipt(2, 1, 0, (0, 1, -1)),
        Completion("ok", 3),
        ChannelConfig(n_rollouts=3, group_timeout_s=1.5),
        [Event(3, "drop", "train", 1.5, {"reason": "stale"})],
    ],
)
def test_an_answer_comes_back_as_what_it_was(value: Any) -> None:
    found = decode_reply(encode_reply(value))
    assert found == value
    assert type(found) is type(value)


def kinds(of: type[HeadraceError] = HeadraceError) -> list[type[HeadraceError]]:
    return list(dict.fromkeys(kind for known in of.__subclasses__() for kind in (known, *kinds(known))))


@pytest.mark.parametrize("kind", kinds())
def test_an_error_is_raised_as_what_it_was(kind: type[HeadraceError]) -> None:
    with pytest.raises(kind, match=r"^what was wrong$") as raised:
        decode_reply(encode_error(kind("what was wrong")))
    assert type(raised.value) is kind


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in kinds()]
    assert sorted(set(codes)) == sorted(codes)


def test_a_batch_can_be_copied_to_another_process_but_not_acknowledged_there() -> None:
    with DataPool() as pool:
        pool.submit_steps([*trajectory("t", 3, metadata={"a": 1}), *group("p", multi_modal_data={"image": b"png"})])
        batch = fetched(pool, 2, lease_s=600)
        copy: Batch = pickle.loads(pickle.dumps(batch))
        assert copy.steps == batch.steps
        assert keys(copy.steps) == [("t", 0), ("t", 1), ("t", 2), ("p/0", 0)]
        assert (copy.lease_id, copy.deadline, copy.channel) == (batch.lease_id, batch.deadline, "train")
        with pytest.raises(LeaseLost, match=f"pool.ack\\({batch.lease_id!r}"):
            copy.ack()
        pool.ack(copy.lease_id or "")
