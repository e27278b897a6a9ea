"""Pausing, aborting, hanging up and new weights: what happens in vLLM happens in Headrace's engine."""

from __future__ import annotations

import http.client
import json
import re
import select
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.engine.kit import Client, Json, Reference, gap
from tests.vllm.kit import PROMPT, TOLERANCE, TRIES, both, shape
from tests.vllm.server import MAX_NUM_SEQS

pytestmark = pytest.mark.alone

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
LONG: Json = {"temperature": 0, "max_tokens": 1500, "ignore_eos": True, "logprobs": 0}
ASKED: dict[str, Json] = {
    COMPLETIONS: {"prompt": PROMPT, "return_token_ids": True, **LONG},
    CHAT: {
        "messages": [{"role": "user", "content": "x"}],
        "return_token_ids": True,
        **{**LONG, "logprobs": True},
    },
    GENERATE: {"token_ids": PROMPT, "sampling_params": LONG},
}
ROUTES = list(ASKED)
T = TypeVar("T")


@pytest.fixture(params=["ours", "theirs"])
def server(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Each of the two in turn; what a test paused goes on after it."""
    found: Client = request.getfixturevalue(request.param)
    yield found
    found.post("/resume")


def ids(chunks: list[Json]) -> list[int]:
    return [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()]


def running(server: Client) -> int:
    """How many calls are being answered: vLLM counts them among its metrics, the engine as its load."""
    connection = http.client.HTTPConnection(server.host, timeout=240)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status == 404:
            return int(server.get("/load")["server_load"])
        return int(sum(float(n) for n in re.findall(r"(?m)^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", text)))
    finally:
        connection.close()


def started(server: Client, path: str, body: Json) -> Future[Any]:
    """A whole answer that is on its way; one that was there before it was seen running is asked for again."""
    while True:
        found = server.later(path, body)
        while not found.done():
            if running(server):
                return found


def begun(server: Client, body: Json) -> http.client.HTTPConnection:
    """A connection on which an answer is on its way."""
    while True:
        connection = http.client.HTTPConnection(server.host, timeout=240)
        connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
        if body["stream"]:
            connection.getresponse().readline()
            return connection
        while not select.select([connection.sock], [], [], 0)[0]:
            if running(server):
                return connection
        connection.close()  # it was there before it was seen running


def reached(server: Client, ask: Callable[[], T], ended_by_itself: Callable[[T], bool]) -> T:
    """What `ask` found of an answer in the midst of which it did something; asked again where that came too late."""
    for _ in range(TRIES):
        found = ask()
        if not ended_by_itself(found):
            break
        server.post("/resume")
    return found


def is_whole(answer: Json) -> bool:
    return bool(answer["choices"][0]["finish_reason"] == "length")


def stream_ended_by(server: Client, path: str, body: Json, ends: Callable[[], Any]) -> list[Json]:
    """The chunks of a stream that `ends`, called after the first, ended before its length did."""
    seen: list[Json] = []

    def ask() -> Json:
        with server.stream(path, body) as chunks:
            seen[:] = [next(chunks)]
            ends()
            seen.extend(chunks)
        return seen[-1]

    reached(server, ask, is_whole)
    return seen


@pytest.mark.parametrize("path", ROUTES)
def test_a_pause_that_aborts_ends_a_stream_with_what_it_has(server: Client, path: str) -> None:
    said = []
    seen = stream_ended_by(server, path, ASKED[path], lambda: said.append(server.post("/pause?mode=abort")))
    assert said[-1] == {"status": "paused"}
    assert seen[-1]["choices"][0]["finish_reason"] == "abort"
    assert seen[-1]["choices"][0]["stop_reason"] is None
    assert 0 <= len(ids(seen)) < 1500
    assert len(ids(seen)) == sum(map(log_probs, seen))


def log_probs(chunk: Json) -> int:
    told = chunk["choices"][0]["logprobs"] or {}
    return len(told.get("content") or told.get("token_logprobs") or ())


@pytest.mark.parametrize("path", ROUTES)
def test_a_pause_that_aborts_ends_a_whole_answer_with_what_it_has(server: Client, path: str) -> None:
    def ask() -> Json:
        asked = started(server, path, ASKED[path])
        server.post("/pause")
        return asked.result(240)

    found = reached(server, ask, is_whole)
    choice = found["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("abort", None)
    assert len(choice["token_ids"]) == found["usage"]["completion_tokens"] < 1500
    assert log_probs(found) == len(choice["token_ids"])


@pytest.mark.parametrize(
    ("path", "stream", "ends"), [(COMPLETIONS, True, []), (COMPLETIONS, False, ["abort"]), (GENERATE, True, ["abort"])]
)
def test_an_answer_that_is_aborted_before_its_first_token_has_none(
    server: Client, path: str, stream: bool, ends: list[str]
) -> None:
    """A stream of a completion then says nothing at all."""
    send = server.chunks if stream else server.post

    def ask() -> list[Json]:
        while True:
            while running(server):  # what was left of the try before
                pass
            with ExitStack() as stack:
                for _ in range(MAX_NUM_SEQS):
                    next(stack.enter_context(server.stream(path, ASKED[path])))
                waits = server.pool.submit(send, path, ASKED[path])
                while running(server) <= MAX_NUM_SEQS and not waits.done():
                    pass
                if waits.done():  # it was answered before it was seen waiting
                    waits.result()
                    continue
                server.post("/pause?mode=abort")
                found = waits.result(240)
            return [choice for chunk in (found if stream else [found]) for choice in chunk["choices"]]

    choices = reached(server, ask, lambda choices: any(choice["token_ids"] for choice in choices))
    assert [(choice["finish_reason"], choice["token_ids"]) for choice in choices] == [(end, []) for end in ends]


def test_a_pause_that_keeps_freezes_a_stream_which_goes_on_as_if_nothing_had_been(server: Client) -> None:
    body = {**ASKED[COMPLETIONS], "max_tokens": 300}
    expected = server.post(COMPLETIONS, body)["choices"][0]["token_ids"]
    with server.stream(COMPLETIONS, body) as chunks:
        seen = [next(chunks)]
        assert server.post("/pause?mode=keep") == {"status": "paused"}
        assert server.get("/is_paused") == {"is_paused": True}
        held = server.later(COMPLETIONS, {**body, "max_tokens": 2})
        assert server.post("/resume") == {"status": "resumed"}
        assert server.get("/is_paused") == {"is_paused": False}
        seen += list(chunks)
    assert ids(seen) == expected
    assert seen[-1]["choices"][0]["finish_reason"] == "length"
    assert held.result(240)["choices"][0]["token_ids"] == expected[:2]


def test_a_pause_that_waits_lets_a_stream_end(server: Client) -> None:
    with server.stream(COMPLETIONS, {**ASKED[COMPLETIONS], "max_tokens": 200}) as chunks:
        seen = [next(chunks)]
        pausing = server.later("/pause?mode=wait", None)
        seen += list(chunks)
    assert seen[-1]["choices"][0]["finish_reason"] == "length"
    assert len(ids(seen)) == 200
    assert pausing.result(240) == {"status": "paused"}


def test_a_stream_is_aborted_by_its_name(server: Client) -> None:
    asked, said = {**ASKED[GENERATE], "request_id": "mine"}, []
    named = {"request_ids": ["generate-tokens-mine"]}
    seen = stream_ended_by(server, GENERATE, asked, lambda: said.append(server.post("/abort_requests", named)))
    assert said[-1] == {"status": "aborted", "aborted": 1}
    assert seen[-1]["choices"][0]["finish_reason"] == "abort"


def test_all_are_aborted_where_none_is_named(server: Client) -> None:
    said = []

    def ask() -> Json:
        asked = started(server, COMPLETIONS, ASKED[COMPLETIONS])
        said.append(server.post("/abort_requests", {}))
        return asked.result(240)

    found = reached(server, ask, is_whole)
    assert said[-1] == {"status": "aborted", "aborted": 1}
    assert found["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_ends_its_answer(server: Client, stream: bool) -> None:
    begun(server, {**ASKED[COMPLETIONS], "stream": stream}).close()
    while running(server):
        pass
    found = server.post(COMPLETIONS, {**ASKED[COMPLETIONS], "max_tokens": 2})
    assert len(found["choices"][0]["token_ids"]) == 2


@pytest.mark.parametrize(
    ("header", "field", "expected"), [("a", None, "a"), (None, "b", "b"), ("a", "b", "a")], ids=str
)
def test_an_answer_is_named_by_the_header_or_the_body(
    server: Client, header: str | None, field: str | None, expected: str
) -> None:
    headers = {} if header is None else {"x-request-id": header}
    named = {} if field is None else {"request_id": field}
    for path, key, prefix in (
        (COMPLETIONS, "id", "cmpl-"),
        (CHAT, "id", "chatcmpl-"),
        (GENERATE, "request_id", "generate-tokens-"),
    ):
        body = {**ASKED[path], **named, "max_tokens": 1, "sampling_params": {"max_tokens": 1}}
        assert server.send("POST", path, body, headers)[1][key] == prefix + expected


def test_a_new_version_is_told_and_found_again(ours: Client, theirs: Client) -> None:
    try:
        both(ours, theirs, "/update_weight_version", {"new_version": "7"})
        for server in (ours, theirs):
            assert server.get("/weight_info") == {"weight_version": "7"}
    finally:
        both(ours, theirs, "/update_weight_version", {"new_version": "default"})


def test_an_answer_that_straddles_a_new_version_tells_which_token_is_of_which(server: Client) -> None:
    body = {**ASKED[GENERATE], "sampling_params": LONG}
    seen: list[Json] = []

    def ask() -> Json:
        try:
            with server.stream(GENERATE, body) as chunks:
                seen[:] = [next(chunks)]
                server.post("/pause?mode=keep")
                server.post("/update_weight_version", {"new_version": "8"})
                server.post("/resume")
                seen.extend(chunks)
        finally:
            server.post("/update_weight_version", {"new_version": "default"})
        return seen[-1]

    reached(server, ask, lambda last: len(last["choices"][0]["weight_versions"]) == 1)
    assert [chunk["choices"][0]["weight_versions"] for chunk in seen[:-1]] == [None] * (len(seen) - 1)
    first, second = seen[-1]["choices"][0]["weight_versions"]
    assert (first["version"], first["start"]) == ("default", 0)
    assert (second["version"], second["start"], second["end"]) == ("8", first["end"], LONG["max_tokens"])


def load(server: Client, folder: Path) -> None:
    server.post("/pause?mode=keep")
    found = server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
    assert found == {"results": [None]}
    assert server.post("/reset_prefix_cache") == {"success": True}
    server.post("/resume")


def test_new_weights_are_those_of_the_checkpoint(server: Client, folder: Path, other: Path) -> None:
    try:
        load(server, other)
        found = server.complete(PROMPT, temperature=1.0, max_tokens=40, seed=1, ignore_eos=True)
    finally:
        load(server, folder)
    back = server.complete(PROMPT, temperature=1.0, max_tokens=40, seed=1, ignore_eos=True)
    for answer, checkpoint in ((found, other), (back, folder)):
        expected = Reference(checkpoint).logprobs(PROMPT, answer["token_ids"])
        assert gap(answer["logprobs"]["token_logprobs"], expected) < TOLERANCE


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/load", "/is_paused", "/weight_info"])
def test_what_a_server_says_of_itself_has_the_shape_of_vllms(ours: Client, theirs: Client, path: str) -> None:
    assert shape(ours.get(path)) == shape(theirs.get(path))
