"""Whatever bytes a rollout server answers with: choices, or an error that says it cannot be read, and never another."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzzing import damaged, examples, mutated
from tests.gateway.upstream.kit import upstream_request

from headrace.data.adapter_name import adapter_version, new_adapter_name
from headrace.gateway.upstream.dispatch import ServerCall
from headrace.gateway.upstream.errors import MalformedAnswer, ServerFault, read_fault
from headrace.gateway.upstream.experts import decode_experts
from headrace.gateway.upstream.gate import Deadline
from headrace.gateway.upstream.http_client import SseDecoder
from headrace.gateway.upstream.server import UpstreamServer, _candidates, version_number
from headrace.gateway.upstream.wire import CompletionsWire, EncodedRequest, GenerateWire
from headrace.net.http_answer import MAX_RETRY_AFTER_S, HttpAnswer, seconds_of

#: What a caller takes for an answer that cannot be read, or for a server's own error.
READ_AS_MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError, ServerFault)


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


EXPERTS = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
COMPLETION: dict[str, Any] = {
    "id": "c",
    "choices": [
        {
            "index": 0,
            "text": "hi",
            "logprobs": {"token_logprobs": [-0.5, None], "tokens": ["h", "i"], "top_logprobs": [{"h": -0.5}, None]},
            "finish_reason": "stop",
            "stop_reason": 7,
            "token_ids": [5, 6],
            "prompt_token_ids": [5, 6, 7],
            "routed_experts": npy(EXPERTS),
        }
    ],
    "error": None,
}
GENERATED: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": None}]},
            "finish_reason": "stop",
            "token_ids": [5, 6],
            "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
        }
    ],
    "prompt_token_ids": [5, 6, 7],
    "mm_placeholders": {"image": [{"offset": 1, "length": 2}]},
    "error": None,
}
REQUESTS = [EncodedRequest.of(upstream_request(top_logprobs=top)) for top in (0, 2)]
WIRES: list[tuple[Any, dict[str, Any]]] = [(CompletionsWire(), COMPLETION), (GenerateWire(), GENERATED)]


def read(wire: Any, data: bytes) -> None:
    for encoded in REQUESTS:
        for how in (wire.whole, wire.piece):
            try:
                for choice in how(encoded, data, 3):
                    assert all(0 <= token < 2**31 for token in choice.ids)
                    assert list(choice.spans) == sorted(choice.spans)
            except READ_AS_MALFORMED:
                pass


@examples(80)
@given(which=st.sampled_from(WIRES), data=st.data())
def test_no_answer_of_a_server_is_read_as_something_else(which: tuple[Any, Any], data: st.DataObject) -> None:
    wire, valid = which
    read(wire, json.dumps(data.draw(mutated(valid))).encode())


@examples(60)
@given(which=st.sampled_from(WIRES), data=st.data())
def test_no_bytes_make_an_answer_fail_otherwise(which: tuple[Any, Any], data: st.DataObject) -> None:
    wire, valid = which
    read(wire, data.draw(damaged(json.dumps(valid).encode())))


def test_valid_answers_stay_valid() -> None:
    (completed,) = CompletionsWire().whole(REQUESTS[1], json.dumps(COMPLETION).encode(), 3)
    assert (completed.ids, completed.text, completed.tokens) == ([5, 6], "hi", ["h", "i"])
    assert np.array_equal(completed.routed_experts, EXPERTS)
    (generated,) = GenerateWire().whole(REQUESTS[0], json.dumps(GENERATED).encode(), 3)
    assert generated.spans == ((0, 3), (1, 4))


# -- events ------------------------------------------------------------------------------------------------------------

LINES = st.sampled_from(
    [b"data: {}", b"data:x", b"data:", b": ping", b"event: a", b"", b"", b"\r", b"data: [DONE]", b"\xff"]
)


@examples(60)
@given(lines=st.lists(LINES, max_size=12), ends=st.sampled_from([b"\n", b"\r\n"]), data=st.data())
def test_any_chunking_gives_the_same_events(lines: list[bytes], ends: bytes, data: st.DataObject) -> None:
    stream = ends.join(lines) + data.draw(st.sampled_from([b"", b"\n\n"]))
    whole = SseDecoder().feed(stream)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder, found = SseDecoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += decoder.feed(stream[start:end])
    assert found == whole


@examples(40)
@given(st.lists(st.binary(max_size=40), max_size=5))
def test_no_bytes_make_a_stream_of_events_fail(chunks: list[bytes]) -> None:
    decoder = SseDecoder()
    size = sum(len(event) for chunk in chunks for event in decoder.feed(chunk))
    assert size <= sum(map(len, chunks)), "nothing is made of less than came"


# -- experts -----------------------------------------------------------------------------------------------------------


@examples(80)
@given(data=damaged(base64.b64decode(npy(EXPERTS)), most=3))
def test_experts_are_an_array_of_integers_or_no_answer(data: bytes) -> None:
    try:
        found = decode_experts(base64.b64encode(data).decode())
    except MalformedAnswer:
        return
    assert found.dtype.kind in "iu"
    assert found.nbytes <= len(data)


def head(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


HOSTILE_FILES = {
    "an archive": b"PK\x03\x04" + bytes(60),
    "objects": head("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n") + b"cos\nsystem\n(S'true'\ntR.",
    "a shape of terabytes": head("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000,)}\n") + bytes(8),
    "a shape below nothing": head("{'descr': '<i8', 'fortran_order': False, 'shape': (-1,)}\n") + bytes(8),
    "half a string": head("{'descr': '''<i8, 'fortran_order': False, 'shape': (1,)}\n") + bytes(8),
    "brackets without end": head("{'descr': " + "(" * 500 + "\n") + bytes(8),
    "another version": b"\x93NUMPY\x09\x00" + bytes(60),
    "numbers with a point": base64.b64decode(npy(np.zeros(3))),
    "a negative index": base64.b64decode(npy(np.array([-1]))),
    "nothing": base64.b64decode(npy(np.zeros(0, np.int32))),
    "no file": b"",
}


@pytest.mark.parametrize("data", HOSTILE_FILES.values(), ids=HOSTILE_FILES)
def test_a_file_that_is_no_array_of_experts_is_no_answer(data: bytes) -> None:
    with pytest.raises(MalformedAnswer, match="routed_experts"):
        decode_experts(base64.b64encode(data).decode())


@pytest.mark.parametrize("array", [EXPERTS, np.asfortranarray(EXPERTS), EXPERTS.astype(">i4")])
def test_an_array_of_experts_is_read_as_it_was_written(array: Any) -> None:
    assert np.array_equal(decode_experts(npy(array)), EXPERTS)


# -- errors, headers, names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [50, 300, 1000])
def test_an_error_that_is_nested_deep_is_told_all_the_same(depth: int) -> None:
    for body in (b"[" * depth + b"]" * depth, b'{"error":' * depth + b"1" + b"}" * depth):
        assert read_fault(500, body).message
        assert HttpAnswer(500, {}, body).error_text()


@examples(60)
@given(data=damaged(b'{"error": {"message": "too long", "param": "prompt", "code": 400}}'))
def test_every_error_has_words(data: bytes) -> None:
    assert read_fault(400, data).message
    assert isinstance(HttpAnswer(400, {}, data).error_text(), str)


@examples(60)
@given(
    st.text(max_size=8)
    | st.sampled_from(["1", "0.5", "-1", "nan", "inf", "1e9", "9" * 5000, "Wed, 21 Oct 2015 07:28:00 GMT", "²", " 3 "])
)
def test_a_server_cannot_make_anybody_wait_for_ever(said: str) -> None:
    found = seconds_of(said)
    assert found is None or 0 <= found <= MAX_RETRY_AFTER_S


def test_seconds_to_wait_are_read() -> None:
    told = {"0": 0.0, "7": 7.0, "1.5": 1.5, " 3 ": 3.0, "99999": MAX_RETRY_AFTER_S, "": None, None: None, "soon": None}
    assert {said: seconds_of(said) for said in told} == told


def test_a_version_of_any_length_is_a_number_or_none() -> None:
    name = new_adapter_name(7)
    assert adapter_version(name) == 7
    assert adapter_version(name.replace("-7-", f"-{'9' * 5000}-")) is None
    assert adapter_version(name.replace("-7-", "-٣-")) is None
    assert [version_number(told) for told in ("7", "9" * 5000, "٣", "", "-1")] == [7, None, None, None, None]


@examples(60)
@given(
    mutated(
        {"choices": [{"logprobs": {"top_logprobs": [{"token_id:5": -0.5, "token_id:6": -1.0}]}}], "usage": {"n": 1}}
    )
)
def test_a_probe_reads_candidates_or_none(found: Any) -> None:
    assert all(isinstance(token, int) for token in _candidates(found))


@pytest.mark.parametrize(("end", "spans"), [(2, ((0, 6), (1, 7))), (9, ((0, 6), (1, 7))), (None, ((0, 5),))])
async def test_versions_of_tokens_that_are_not_there_are_not_taken(end: int | None, spans: Any) -> None:
    """`end` None: the second version begins behind the last token."""
    first, last = (1, end) if end is not None else (2, 3)
    told = [{"version": "6", "start": 0, "end": first}, {"version": "7", "start": first, "end": last}]
    answer = {**GENERATED, "choices": [{**GENERATED["choices"][0], "weight_versions": told}], "mm_placeholders": None}
    server, encoded = UpstreamServer("http://127.0.0.1:1", 5), REQUESTS[0]
    call = ServerCall(Any, server, server.generate_url, GenerateWire(), encoded, Deadline(240, 240), 1 << 20)  # type: ignore[arg-type]

    async def exchange() -> bytes:
        return json.dumps(answer).encode()

    call._exchange = exchange  # type: ignore[method-assign]
    (choice,) = await call.whole()
    assert choice.spans == spans
    assert server.version == max(version for _, version in spans)
