"""Every part of `headrace bench gateway` at sizes at which the figures mean nothing, and their shape everything."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.gateway.load import FULL, QUICK, SOURCE, GatewayLoad, GatewaySizes, LoadTarget, speech, words_from
from headrace.bench.gateway.measure import BARS, PARTS
from headrace.bench.gateway.servers import build_tokenizer, start_proxy, start_stub
from headrace.bench.server_process import ServerProcess
from headrace.tokens import load_vocabulary

pytestmark = pytest.mark.system

TINY = GatewaySizes(
    "tiny",
    turns=2,
    first_words=20,
    more_words=5,
    sampled=8,
    many_callers=4,
    some_callers=2,
    trajectories_a_caller=1,
    throughput_rounds=1,
    many_turns=3,
    chat_rounds=1,
    lone_trajectories=1,
    lone_rounds=1,
    short_words=20,
    long_history=150,
    long_turn_words=20,
    history_calls=2,
    history_rounds=1,
    ray_rounds=1,
    first_token_ms=5,
    streams=1,
    stream_rounds=1,
    live_streams=2,
    live_tokens=8,
    live_rate=60.0,
    live_rounds=1,
    held_streams=3,
    held_tokens=8,
    worker_rounds=1,
    overload_calls=2,
    overload_idle=5,
    overload_slow=2,
    overload_tokens=8,
    page_trajectories_a_caller=1,
    page_views=2,
    page_rounds=1,
)

KEYS = {
    "passthrough": {"vs_passthrough", "added_p50_ms_vs_passthrough", "req_s", "cpu_ms"},
    "chat": {
        "chat_vs_passthrough",
        "chat20_vs_passthrough",
        "trajectory_vs_passthrough",
        "trajectory20_vs_passthrough",
    },
    "dialects": {"responses_vs_chat", "messages_vs_chat"},
    "history": {"history_flat", "bridge_vs_full"},
    "ray": {"ray_vs_embedded"},
    "stream": {"stream_vs_direct"},
    "live_streams": {"stream_us_token", "stream_vs_proxy", "stream250_vs_proxy", "streams_held"},
    "workers": {"workers2_cpu"},
    "overload": {
        "overload_finished",
        "overload_refused",
        "overload_refusal_p99_ms",
        "overload_health_p99_ms",
        "overload_rss_mb",
    },
    "dashboard": {"dashboard_throughput", "dashboard_loop_ms_max"},
}
#: Differences, which noise may turn around at such sizes, and what a busy machine may bring to nothing.
SIGNED = {
    "added_p50_ms_vs_passthrough",
    "streams_held",
    "overload_refused",
    "overload_refusal_p99_ms",
    "overload_rss_mb",
}

RECORDED = Path(__file__).parents[1] / "engine" / "vllm"


#: Parts that start most, or measure what `tests/gateway` shows to work.
LONG = ("history", "dialects", "live_streams", "workers", "overload", "dashboard")
MARKS = {"ray": [pytest.mark.ray, pytest.mark.long], **{part: [pytest.mark.long] for part in LONG}}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in KEYS])
@pytest.mark.timeout(1800)
def test_a_part_measures_its_keys(name: str, tmp_path: Path) -> None:
    part = PARTS[name](TINY, tmp_path)
    assert set(part.ratios) == KEYS[name]
    for key, figure in (*part.ratios.items(), *part.absolute.items()):
        assert type(figure) is float
        assert math.isfinite(figure)
        assert figure > 0 or key in SIGNED


def test_the_parts_cover_the_bars() -> None:
    assert set(KEYS) == set(PARTS)
    assert set().union(*KEYS.values()) == set(BARS)


def test_quick_takes_fewer_rounds_of_the_same_sizes() -> None:
    quick, full = asdict(QUICK), asdict(FULL)
    changed = {name for name in full if quick[name] != full[name]}
    assert changed == {"name"} | {name for name in changed if name.endswith("rounds")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def stub(folder: Path) -> Iterator[ServerProcess]:
    with start_stub(folder, TINY) as child:
        yield child


def post(address: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return bytes(answer.read())


def events(raw: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_word_that_agents_say_is_a_token(tmp_path: Path) -> None:
    build_tokenizer(tmp_path)
    assert len(load_vocabulary(tmp_path).encode(words_from(speech(), 3, 500))) == 500


def test_the_tokenizer_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build_tokenizer(tmp_path / name)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


def test_the_stub_answers_in_vllms_shape(stub: ServerProcess) -> None:
    recorded = json.loads((RECORDED / "completions_ids_logprobs.json").read_text())
    found = json.loads(post(stub.address + "/v1/completions", recorded["request"]["body"]))
    (choice,), (expected,) = found["choices"], recorded["response"]["choices"]
    assert set(choice) == set(expected) - {"prompt_logprobs", "routed_experts"}
    assert set(choice["logprobs"]) == set(expected["logprobs"])
    assert choice["prompt_token_ids"] == recorded["request"]["body"]["prompt"]
    assert found["usage"] == {"prompt_tokens": 13, "total_tokens": 21, "completion_tokens": 8}


def test_the_stubs_text_and_log_probs_are_those_of_its_ids(stub: ServerProcess, folder: Path) -> None:
    (choice,) = json.loads(post(stub.address + "/v1/completions", {"prompt": [5]}))["choices"]
    assert load_vocabulary(folder).decode(choice["token_ids"]) == choice["text"] == SOURCE[: len(choice["text"])]
    log_probs = choice["logprobs"]
    assert len(choice["token_ids"]) == len(log_probs["token_logprobs"]) == TINY.sampled
    for at, text in zip(log_probs["text_offset"], log_probs["tokens"], strict=True):
        assert choice["text"].startswith(text, at)


def test_the_stubs_stream_is_its_answer_token_by_token(stub: ServerProcess) -> None:
    whole = json.loads(post(stub.address + "/v1/completions", {"prompt": [5, 6]}))
    *tokens, last = events(post(stub.address + "/v1/completions", {"prompt": [5, 6], "stream": True}))
    choices = [event["choices"][0] for event in tokens]
    assert [choice["token_ids"] for choice in choices] == [[token] for token in whole["choices"][0]["token_ids"]]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6]] + [None] * (TINY.sampled - 1)
    assert [choice["finish_reason"] for choice in choices] == [None] * (TINY.sampled - 1) + ["length"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_the_stubs_chat_says_the_same_streamed_or_not(stub: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    whole = json.loads(post(stub.address + "/v1/chat/completions", body))
    streamed = events(post(stub.address + "/v1/chat/completions", {**body, "stream": True}))
    text = "".join(event["choices"][0]["delta"]["content"] for event in streamed)
    assert text == whole["choices"][0]["message"]["content"] != ""


def test_the_stub_has_no_other_routes(stub: ServerProcess) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        post(stub.address + "/tokenize", {})


def test_the_proxy_gives_what_the_stub_gives(stub: ServerProcess) -> None:
    with start_proxy(stub) as proxy:
        for path, body in (("/v1/completions", {"prompt": [7]}), ("/v1/chat/completions", {"messages": []})):
            assert post(proxy.address + path, body) == post(stub.address + path, body)


def test_a_round_is_all_calls_of_all_trajectories(stub: ServerProcess) -> None:
    with GatewayLoad(TINY) as load:
        found = load.round(LoadTarget(stub.address, trajectories=False), callers=3, trajectories=7)
    assert len(found.latencies) == 7 * TINY.turns
    assert found.rate == pytest.approx(14 / found.took)


def test_a_call_that_fails_ends_the_run(stub: ServerProcess) -> None:
    with GatewayLoad(TINY) as load, pytest.raises(RuntimeError, match="/init_trajectory was answered 404"):
        load.round(LoadTarget(stub.address), callers=1, trajectories=1)


def test_a_childs_cpu_is_its_own(stub: ServerProcess) -> None:
    before, start = stub.cpu_s(), time.process_time()
    while time.process_time() < start + 0.2:
        pass
    idle = stub.cpu_s() - before
    with GatewayLoad(TINY) as load:
        load.round(LoadTarget(stub.address, trajectories=False), callers=2, trajectories=200)
    assert idle < 0.2
    assert stub.cpu_s() - before > idle


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        ServerProcess("headrace.bench.gateway.servers", "stub") as child,
        pytest.raises(RuntimeError, match=r"ended with code 1 before it was ready; it said: (?s:.)*TypeError"),
    ):
        _ = child.address
