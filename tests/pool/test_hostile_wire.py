"""Frames whose checksums are right and whose content is not: a call that no client of ours would make, an answer that
no pool of ours would give. Each is an error of ours, within bounds of time, and what is there stays as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzzing import corpus, damaged, deep, examples, mutated
from tests.gateway.kit import serving
from tests.pool.kit import group, trajectory

from headrace import DataPool
from headrace.data import frame
from headrace.data.block import BlockHeader, StepHead
from headrace.data.errors import FrameError, HeadraceError, InvalidInput
from headrace.data.packing import pack
from headrace.data.trajectory import Trajectory
from headrace.pool.config import ChannelConfig
from headrace.pool.errors import InternalError
from headrace.pool.http import create_app
from headrace.pool.operation import Completion, Receipt
from headrace.pool.operations import OPERATIONS
from headrace.pool.service import answer
from headrace.pool.state import Event
from headrace.pool.wire import (
    decode_call,
    decode_reply,
    encode_call,
    encode_error,
    encode_groups,
    encode_reply,
)

CORPUS = Path(__file__).parent / "corpus"
PATIENCE_S = 240
#: Arguments of operations that have no default.
USUAL: dict[str, Any] = {
    **{"trajectory_uid": "t", "trajectory_uids": ["t"], "channel": "train", "lease_id": "l", "reason": "r"},
    **{"timeout": 0, "filters": {"limit": 3, "trajectory_uid": "t"}, "rewards": {0: 1.0}, "reward": 1.0, "n": 1},
}


def media() -> dict[str, Any]:
    return {"image": b"png", "pixels": np.zeros((2, 3), np.float32), "nested": [{"more": b"bytes"}]}


def held() -> list[Any]:
    """Steps of every kind: of several turns, with media, and in groups."""
    return [*trajectory("t", 3, metadata={"a": [1, {"b": 2}]}), *group("p", multi_modal_data=media())]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    found = asyncio.new_event_loop()
    yield found
    found.close()


def opened(data: bytes) -> tuple[Any, bytes]:
    """What a frame's header holds, as plain values, and its body."""
    found = frame.decode(data)
    return msgspec.msgpack.decode(found.header), bytes(found.body)


def message(header: Any, body: bytes = b"") -> bytes:
    packed = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    return frame.frame_bytes(frame.FrameKind.MESSAGE, packed, [body])


# -- calls -------------------------------------------------------------------------------------------------------------


def calls() -> Iterator[tuple[Any, bytes]]:
    """A call of every operation, as plain values, and its body."""
    for name, kind in OPERATIONS.items():
        if name == "submit":
            yield opened(encode_call(name, {"channel": "train", "timeout": 0}, pack(held())))
            continue
        arguments: dict[str, Any] = {}
        for field in msgspec.structs.fields(kind):
            known = USUAL.get(field.name, field.default)
            arguments[field.name] = 1 if known is msgspec.NODEFAULT else known
        yield opened(encode_call(name, msgspec.to_builtins(arguments, enc_hook=lambda value: None)))


CALLS = list(calls())
SUBMIT = next(call for call in CALLS if call[0][0] == "submit")


def waits(header: Any) -> bool:
    """Whether a call may be made to wait, which is what it asks for."""
    given = header[1] if isinstance(header, list) and len(header) > 1 and isinstance(header[1], dict) else {}
    return "timeout" in given and given["timeout"] not in (0, False)


def asked(pool: DataPool, data: bytes, loop: asyncio.AbstractEventLoop) -> HeadraceError | None:
    """The error that a call ends with, if any; it must be the caller's own."""
    _, error = loop.run_until_complete(asyncio.wait_for(answer(pool, data), PATIENCE_S))
    assert not isinstance(error, InternalError), error
    return error


@examples(100)
@given(call=st.one_of(st.sampled_from(CALLS), st.just(SUBMIT)), data=st.data())
def test_no_call_makes_a_pool_fail(call: tuple[Any, bytes], data: st.DataObject, loop: Any) -> None:
    header = data.draw(mutated(call[0]))
    if waits(header):
        return
    with DataPool() as pool:
        pool.submit_steps(held())
        before = pool.stats()["ledger"]["submitted"]
        error = asked(pool, message(header, call[1]), loop)
        if error is not None:
            assert pool.stats()["ledger"]["submitted"] == before
        for row in pool.list_trajectories()["items"]:
            assert pool.trajectory(row["trajectory_uid"]).steps, "what was taken can be read"


@examples(40)
@given(data=damaged(message(*SUBMIT)))
def test_a_call_that_is_damaged_is_refused(data: bytes) -> None:
    if data != message(*SUBMIT):
        with pytest.raises(HeadraceError):
            decode_call(data)


@pytest.mark.parametrize("case", corpus(CORPUS / "calls"), ids=lambda path: path.stem)
def test_a_call_that_was_a_failure_once_is_the_callers_own(case: Path, loop: Any) -> None:
    with DataPool() as pool:
        assert isinstance(asked(pool, case.read_bytes(), loop), FrameError | InvalidInput)
        assert pool.stats()["ledger"]["submitted"] == 0


def test_an_array_that_could_not_be_put_together_is_not_taken() -> None:
    """Whoever fetched it would fail at it, again and again."""
    block = pack(group("p", multi_modal_data={"pixels": np.zeros((2, 3), np.float32)}))
    for dtype, shape in (("<f4", [7]), ("O", [6]), ("nonsense", [6]), ("<f4", "many"), (None, []), ("<f8", [2, 3])):
        head = block.heads[0]
        extra = msgspec.msgpack.decode(head.extra)
        extra["multi_modal_data"]["pixels"] |= {"dtype": dtype, "shape": shape}
        changed = msgspec.structs.replace(head, extra=msgspec.msgpack.encode(extra))
        block.heads[0] = changed
        with pytest.raises(InvalidInput, match="step 0: multi_modal_data holds an array"):
            decode_call(encode_call("submit", {}, block))
        block.heads[0] = head
    decode_call(encode_call("submit", {}, block))


def test_metadata_that_nests_too_deep_or_is_too_large_is_not_taken() -> None:
    block = pack(group("p", metadata={"a": 1}))
    for value, said in ((deep(depth=200), "nests deeper than 100"), ("x" * 2_000_000, "bytes; at most")):
        block.heads[0].extra = msgspec.msgpack.encode({"metadata": {"a": value}})
        with pytest.raises(InvalidInput, match=said):
            decode_call(encode_call("submit", {}, block))


# -- answers -----------------------------------------------------------------------------------------------------------


def replies() -> Iterator[tuple[Any, bytes]]:
    """An answer of every kind, as plain values, and its body."""
    with DataPool() as pool:
        pool.submit_steps(held())
        yield opened(encode_reply(pool.trajectory("t")))
        batch = pool.fetch_batch(2, lease_s=60)
        assert batch is not None
        yield opened(encode_groups(batch.groups))
    for value in (
        Receipt(2, 1, 0, (0, 1, -1)),
        Completion("ok", 3),
        ChannelConfig(n_rollouts=3),
        [Event(3, "drop", "train", 1.5, {"reason": "stale"})],
        {"ledger": {"queued": 3}},
    ):
        yield opened(encode_reply(value))
    yield opened(encode_error(InvalidInput("what was wrong")))


REPLIES = list(replies())


def read_whole(data: bytes) -> None:
    """Reads all that an answer holds."""
    found = decode_reply(data)
    groups = getattr(found, "groups", None)
    if groups is not None:
        groups.steps()
        for each in groups:
            assert each.steps is not None
            each.sequences()
    elif isinstance(found, Trajectory):
        assert found.steps is not None
        found.sequences()


@examples(100)
@given(reply=st.one_of(st.sampled_from(REPLIES), st.sampled_from(REPLIES[:2])), data=st.data())
def test_no_answer_makes_a_client_fail_otherwise_than_it_may(reply: tuple[Any, bytes], data: st.DataObject) -> None:
    header = data.draw(mutated(reply[0]))
    try:
        read_whole(message(header, reply[1]))
    except HeadraceError:
        pass


@pytest.mark.parametrize("case", corpus(CORPUS / "answers"), ids=lambda path: path.stem)
def test_an_answer_that_was_a_failure_once_is_no_answer(case: Path) -> None:
    with pytest.raises(HeadraceError):
        read_whole(case.read_bytes())


def test_valid_answers_stay_valid() -> None:
    for header, body in REPLIES[:-1]:
        read_whole(message(header, body))
    with pytest.raises(InvalidInput, match="what was wrong"):
        decode_reply(message(*REPLIES[-1]))


def test_steps_that_build_on_each_other_in_a_circle_end_in_an_error() -> None:
    """A walk from them to the root would not end."""
    heads = [StepHead("t", "p", 1, 1, False, index, 1.0, 0, base=1 - index, keep=9) for index in range(2)]
    block = BlockHeader(heads, 16, 0, [])
    found = ["p", 1, False, False, 0, [["t", "p", "train", True, {}, None, "queued", 2]]]
    data = message(msgspec.msgpack.encode(["trajectory", None, [found], block]), bytes(16))
    with pytest.raises(FrameError, match="builds on 9 tokens of step 1"):
        decode_reply(data)


# -- what people ask for -----------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(["", "0", "-1", "1e400", "9" * 30, "t", "true", "null", "[]", "{}", "%00", "a-b", "\x00", "é"])
NAMES = ["channel", "limit", "cursor", "prompt_uid", "trajectory_uid", "tag", "state", "complete", "min_reward"]


@examples(25)
@given(query=st.dictionaries(st.sampled_from([*NAMES, "self", "filters", "trainable", ""]), TEXTS, max_size=3))
def test_no_query_makes_a_pool_fail(query: dict[str, str], pool_address: httpx.Client) -> None:
    for path in ("groups", "trajectories", "steps", "events", "stats", "trajectories/%00", "trajectories/%ff"):
        found = pool_address.get(f"/pool/{path}", params=query)
        assert found.status_code in (200, 400, 404, 422), (path, query, found.text)


@pytest.fixture(scope="module")
def pool_address() -> Iterator[httpx.Client]:
    with DataPool() as pool:
        pool.submit_steps(held())
        with (
            serving(create_app(pool), lifespan=False) as address,
            httpx.Client(base_url=address, trust_env=False, timeout=PATIENCE_S) as found,
        ):
            yield found
