"""Streams as agents see them flushed: by channel, the first token at once, parts in the order in which they came."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.kit import Json, Running
from tests.gateway.rollout import Rollout, Say, events_of, in_front, user

from headrace.data.errors import InvalidInput
from headrace.gateway import Settings
from headrace.gateway.flushing import FlushTimes
from headrace.gateway.upstream import http_client

ANSWER = "one two three four five six seven eight"


def test_times_by_channel() -> None:
    times = FlushTimes("50, rollouts:250,a:b:0")
    assert [times.seconds(name) for name in ("train", "rollouts", "a:b")] == [0.05, 0.25, 0.0]


@pytest.mark.parametrize("spec", ["", "soon", "-1", "50,250", "50,:250", "50,a:x", "50,a:1,a:2", "nan", "1e9"])
def test_times_that_are_none_are_refused(spec: str) -> None:
    with pytest.raises(InvalidInput, match=r"50,rollouts:250|twice"):
        FlushTimes(spec)


@pytest.mark.parametrize(("given", "seconds"), [(250, 0.25), (0, 0.0), ("10,b:20", 0.01)])
def test_settings_take_a_number_too(given: Any, seconds: float) -> None:
    settings = Settings(vllm_addresses="http://127.0.0.1:1", stream_flush_ms=given)
    assert FlushTimes(settings.stream_flush_ms).seconds("a") == seconds


@pytest.fixture(scope="module")
def flushed(shared: Rollout, folder: Path) -> Iterator[Running]:
    """A gateway that gathers what it writes up to an answer's end, but for one channel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_client, "PAUSED_HOLD_S", math.inf)
        with in_front(shared, folder, stream_flush_ms="10000,every:0") as found:
            yield found


def base_of(gateway: Running, channel: str) -> str:
    base: str = gateway.init()["base_url"]
    gateway.post(f"{base}/v1/register_trajectory", {"channel": channel}).raise_for_status()
    return base


def deltas(gateway: Running, base: str, **fields: Any) -> list[Json]:
    body = {"model": "m", "messages": [user("count")], "stream": True, **fields}
    text = gateway.post(f"{base}/v1/chat/completions", body).text
    return [chunk["choices"][0]["delta"] for chunk in events_of(text) if chunk.get("choices")]


def test_a_channel_has_its_own_time(flushed: Running, rollout: Rollout) -> None:
    count = len(rollout.vocabulary.encode(ANSWER))
    for channel, pieces in (("every", count), ("train", 2)):
        rollout.script.append(Say(ANSWER, after=(1, gate := rollout.gate())))
        gate.open()
        said = [delta["content"] for delta in deltas(flushed, base_of(flushed, channel)) if delta.get("content")]
        assert "".join(said) == ANSWER
        assert len(said) <= pieces
        assert channel == "train" or len(said) == count


def test_the_first_token_is_sent_before_there_is_a_second(flushed: Running, rollout: Rollout) -> None:
    gate = rollout.gate()
    rollout.script.append(Say(ANSWER, after=(1, gate)))
    body = {"model": "m", "messages": [user("count")], "stream": True}
    said: list[Json] = []
    with flushed.http.stream("POST", f"{base_of(flushed, 'train')}/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        first = ""
        while not first:
            line = next(lines)
            first = json.loads(line[6:])["choices"][0]["delta"]["content"] if line else ""
        gate.open()  # only now does the server go on
        said = events_of("\n".join(lines))
    assert ANSWER.startswith(first)
    assert first + "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in said) == ANSWER


def test_log_probs_and_ids_of_all_tokens_are_told(flushed: Running, rollout: Rollout) -> None:
    found: dict[str, tuple[list[Any], list[int]]] = {}
    for channel in ("every", "train"):
        rollout.script.append(Say(ANSWER))
        body = {"model": "m", "messages": [user("count")], "stream": True, "logprobs": True, "return_token_ids": True}
        text = flushed.post(f"{base_of(flushed, channel)}/v1/chat/completions", body).text
        rows = [chunk["choices"][0] for chunk in events_of(text) if chunk.get("choices")]
        entries = [entry for row in rows for entry in (row.get("logprobs") or {}).get("content") or ()]
        found[channel] = entries, [token for row in rows for token in row.get("token_ids") or ()]
    assert found["train"] == found["every"]
    assert found["train"][1] == [*rollout.vocabulary.encode(ANSWER), rollout.end]


def test_parts_come_in_the_order_in_which_they_were_said(flushed: Running, rollout: Rollout) -> None:
    """A text between two calls stays between them, though all of it is written at once."""
    call = '<tool_call>\n{"name": "look", "arguments": {"at": %d}}\n</tool_call>'
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    kinds: dict[str, list[str]] = {}
    for channel in ("every", "train"):
        rollout.script.append(Say(f"First.\n{call % 1}\nThen.\n{call % 2}"))
        body = {"model": "m", "input": "Look around.", "stream": True, "tools": tools}
        text = flushed.post(f"{base_of(flushed, channel)}/v1/responses", body).text
        names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
        kinds[channel] = [name for at, name in enumerate(names) if name != names[at - 1]]
    assert kinds["train"] == kinds["every"]
