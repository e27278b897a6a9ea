"""Streams of Responses and Messages put together again, and what is found wrong with them on the way."""

from __future__ import annotations

import json
from typing import Any

from headrace.checkup.item_dialects import MessagesClient, ResponsesClient

Json = dict[str, Any]


def causes(dialect: ResponsesClient | MessagesClient, events: list[Json]) -> list[str]:
    return [cause for cause, _ in dialect.join([json.dumps(event).encode() for event in events]).troubles]


def response(said: str, ended: str) -> list[Json]:
    """The events of a response; `said` is what its deltas say, `ended` what its end says."""
    part = {"type": "output_text", "text": ended}
    whole = {"status": "completed", "output": [{"type": "message", "id": "m", "content": [part]}]}
    events: list[Json] = [{"type": "response.created", "response": {"output": []}}]
    events += [{"type": "response.output_text.delta", "item_id": "m", "delta": char} for char in said]
    events += [{"type": "response.output_text.done", "item_id": "m", "text": said}]
    events += [{"type": "response.completed", "response": whole}]
    return [{**event, "sequence_number": at} for at, event in enumerate(events)]


def message(text: str) -> list[Json]:
    events: list[Json] = [{"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 3}}}]
    events += [{"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}]
    for char in text:
        delta = {"type": "text_delta", "text": char}
        events += [{"type": "content_block_delta", "index": 0, "delta": delta}]
    events += [{"type": "content_block_stop", "index": 0}]
    ended = {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}}
    return [*events, {"type": "message_delta", **ended}, {"type": "message_stop"}]


def test_a_response_whose_deltas_join_to_its_end_has_no_trouble() -> None:
    assert causes(ResponsesClient(), response("hi", "hi")) == []


def test_a_response_whose_end_says_something_else_is_found() -> None:
    assert causes(ResponsesClient(), response("hi", "ho")) == ["deltas_differ"]


def test_a_response_with_an_event_missing_or_without_an_end_is_found() -> None:
    events = response("hi", "hi")
    assert "event_order" in causes(ResponsesClient(), events[:1] + events[2:])
    assert "no_end" in causes(ResponsesClient(), events[:-1])


def test_a_message_s_events_are_its_blocks_how_it_ended_and_what_it_took() -> None:
    stream = MessagesClient().join([json.dumps(event).encode() for event in [{"type": "ping"}, *message("hi")]])
    (answer,) = MessagesClient().read(stream.body)
    assert stream.troubles == []
    assert (answer.text, answer.finish, answer.consumed, answer.sampled) == ("hi", "stop", 3, 2)


def test_a_message_whose_delta_comes_before_its_block_or_that_never_stops_is_found() -> None:
    events = message("hi")
    assert causes(MessagesClient(), [events[0], events[2], *events[3:]])[:1] == ["event_order"]
    assert causes(MessagesClient(), events[:-1]) == ["event_order"]
