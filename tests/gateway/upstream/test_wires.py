"""What is sent and how answers are read, on vLLM's recorded ones."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.upstream.kit import upstream_request

from headrace.gateway.upstream.errors import MalformedAnswer, ServerFault, read_fault
from headrace.gateway.upstream.http_client import SseDecoder
from headrace.gateway.upstream.wire import CompletionsWire, EncodedRequest, GenerateWire

SAMPLES = Path(__file__).parents[2] / "engine" / "vllm"


def sample(name: str) -> Any:
    return json.loads((SAMPLES / name).read_text())


def answer_of(name: str) -> tuple[EncodedRequest, bytes, Any]:
    found = sample(name)
    body = found["request"]["body"]
    prompt = body.get("prompt") or body["token_ids"]
    return (
        EncodedRequest.of(upstream_request(prompt, n=body.get("n", 1))),
        orjson.dumps(found["response"]),
        found["response"]["choices"],
    )


def test_a_recorded_completion_is_read_as_it_stands() -> None:
    asked, data, (truth,) = answer_of("completions_ids_logprobs.json")
    (choice,) = CompletionsWire().whole(asked, data, 0)
    assert choice.ids == truth["token_ids"]
    assert choice.log_probs == truth["logprobs"]["token_logprobs"]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (truth["text"], "length", None)
    assert choice.consumed is asked.request.prompt


def test_a_recorded_stop_on_eos_keeps_its_id_and_log_prob() -> None:
    asked, data, (truth,) = answer_of("completions_stop_eos.json")
    (choice,) = CompletionsWire().whole(asked, data, 0)
    assert choice.ids == truth["token_ids"]
    assert len(choice.ids) == len(choice.log_probs or [])
    assert choice.finish_reason == "stop"


def test_a_recorded_answer_of_two_choices_is_read() -> None:
    asked, data, truth = answer_of("completions_prompt_logprobs_n2.json")
    assert [choice.ids for choice in CompletionsWire().whole(asked, data, 0)] == [
        choice["token_ids"] for choice in truth
    ]


def test_a_recorded_stream_is_read_piece_by_piece() -> None:
    request, _, stream = (SAMPLES / "completions_stream.sse.txt").read_bytes().partition(b"\n-----\n")
    asked = EncodedRequest.of(upstream_request(json.loads(request)["prompt"]))
    events = SseDecoder().feed(stream)
    assert events[-1] == b"[DONE]"
    found = [piece for event in events[:-1] for piece in CompletionsWire().piece(asked, event, 0)]
    assert [piece.ids for piece in found] == [[1069], [654], [350], [831]]
    assert "".join(piece.text or "" for piece in found) == "enceprone" + "sh"
    assert [piece.consumed is asked.request.prompt for piece in found] == [True, False, False, False]
    assert [piece.finish_reason for piece in found] == [None, None, None, "length"]


def test_a_recorded_answer_of_generate_is_read() -> None:
    asked, data, (truth,) = answer_of("inference_v1_generate.json")
    (choice,) = GenerateWire().whole(asked, data, 0)
    assert choice.ids == truth["token_ids"]
    assert choice.log_probs == [entry["logprob"] for entry in truth["logprobs"]["content"]]
    assert (choice.text, choice.consumed, choice.spans) == (None, None, ())


def test_versions_that_generate_tells_are_its_spans() -> None:
    asked, data, _ = answer_of("inference_v1_generate.json")
    found = json.loads(data)
    spans = [{"version": "6", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 6}]
    found["choices"][0]["weight_versions"] = spans
    assert GenerateWire().whole(asked, orjson.dumps(found), 0)[0].spans == ((0, 6), (2, 7))


def test_routed_experts_become_an_array() -> None:
    asked, data, _ = answer_of("inference_v1_generate.json")
    routed = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    file = io.BytesIO()
    np.save(file, routed)
    found = json.loads(data)
    found["choices"][0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    assert np.array_equal(GenerateWire().whole(asked, orjson.dumps(found), 0)[0].routed_experts, routed)
    found["choices"][0]["routed_experts"] = "AAAA"
    with pytest.raises(MalformedAnswer, match="routed_experts"):
        GenerateWire().whole(asked, orjson.dumps(found), 0)


def test_a_completion_asks_for_ids_and_keeps_what_it_does_not_know() -> None:
    asked = EncodedRequest.of(
        upstream_request(
            [1, 2], stop=["x"], min_p=None, extra={"priority": 3, "logprobs": 9}, top_logprobs=4, call_id="c"
        )
    )
    body = orjson.loads(CompletionsWire().body(asked, "served", stream=True))
    assert body == {
        "priority": 3,
        "max_tokens": 8,
        "temperature": 1.0,
        "stop": ["x"],
        "model": "served",
        "prompt": [1, 2],
        "logprobs": 4,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "request_id": "c",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x"]},
        {"top_logprobs": 1},
        {"extra": {"priority": 1}},
        {"logit_bias": {"3": 1.0}},
        {"structured_outputs": {"json": {}}},
    ],
)
def test_what_generate_cannot_do_is_left_to_completions(fields: dict[str, Any]) -> None:
    assert not GenerateWire.can_serve(upstream_request(**fields))


def test_generate_does_what_only_says_nothing() -> None:
    assert GenerateWire.can_serve(upstream_request(stop=[], logit_bias=None, stop_token_ids=[2], n=2))


def test_a_prompt_that_differs_is_told_as_it_was_consumed() -> None:
    asked = EncodedRequest.of(upstream_request([1, 2, 3]))
    assert asked.consumed(msgspec.Raw(b"[1,2,3]")) is asked.request.prompt
    assert asked.consumed(msgspec.Raw(b"[ 1, 2, 3 ]")) is asked.request.prompt
    assert asked.consumed(msgspec.Raw(b"null")) is None
    other = asked.consumed(msgspec.Raw(b"[0,1,2,3]"))
    assert other is not None
    assert other.tolist() == [0, 1, 2, 3]


@given(st.integers(1, 2000), st.integers(1, 3), st.booleans(), st.booleans())
def test_a_long_prompt_is_told_the_same_however_it_is_read(length: int, n: int, same: bool, spaced: bool) -> None:
    asked = EncodedRequest.of(upstream_request(list(range(length)), n=n))
    told = asked.request.prompt.tolist() if same else [*asked.request.prompt.tolist()[:-1], 9]
    fields = {"text": '"prompt_token_ids":' + json.dumps(told), "token_ids": [1], "prompt_token_ids": told}
    choices = [{"index": index, **fields} for index in range(n)]
    data = json.dumps({"choices": choices}, separators=(", ", ": ") if spaced else (",", ":")).encode()
    for choice in CompletionsWire().whole(asked, data, 0):
        assert choice.consumed is not None
        assert choice.consumed.tolist() == told
        assert (choice.consumed is asked.request.prompt) == (told == asked.request.prompt.tolist())
        assert choice.text == fields["text"]
        assert choice.ids == [1]


def test_log_probs_are_handed_on_even_where_they_are_wrong() -> None:
    asked, data, _ = answer_of("completions_ids_logprobs.json")
    found = json.loads(data)
    found["choices"][0]["logprobs"]["token_logprobs"] = [None, -1.0]
    log_probs = CompletionsWire().whole(asked, orjson.dumps(found), 0)[0].log_probs
    assert log_probs is not None
    assert math.isnan(log_probs[0])
    assert log_probs[1:] == [-1.0]


def test_a_server_that_tells_no_ids_is_named_as_that() -> None:
    asked, data, _ = answer_of("completions_ids_logprobs.json")
    found = json.loads(data)
    del found["choices"][0]["token_ids"]
    with pytest.raises(MalformedAnswer, match="token_ids"):
        CompletionsWire().whole(asked, orjson.dumps(found), 0)


def test_an_error_in_a_stream_is_the_servers_word() -> None:
    event = b'{"error": {"message": "Token id 9 is out of vocabulary", "param": null, "code": 400}}'
    for wire in (CompletionsWire(), GenerateWire()):
        with pytest.raises(ServerFault) as caught:
            wire.piece(EncodedRequest.of(upstream_request()), event, 0)
        assert (caught.value.status, caught.value.message) == (400, "Token id 9 is out of vocabulary")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no", "param": "n"}}', "no"),
        (b'{"error": "no"}', "no"),
        (b'{"detail": "no"}', "no"),
        (b"no", "no"),
        (b"", "status 418 without a reason"),
        (b"\xff", "\ufffd"),
        (b"<html>\n  <h1>No such page</h1>\r\n</html>\n", "<html> <h1>No such page</h1> </html>"),
    ],
)
def test_what_is_wrong_is_found_in_every_shape(body: bytes, message: str) -> None:
    assert read_fault(418, body).message == message
