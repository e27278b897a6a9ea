"""How agents speak Responses: items that they keep, and streams whose events come in the documented order."""

from __future__ import annotations

import json
from typing import Any

import httpx
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from tests.gateway.kit import Running
from tests.gateway.play import PARAMETERS

Json = dict[str, Any]

ADD: Json = {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def settled(base_url: str, **more: Any) -> Json:
    return {"base_url": base_url, "api_key": "none", "max_retries": 0, **more}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def respond(gateway: Running, base: str, given: Any, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", None)
    return gateway.post(f"{base}/v1/responses", {"model": "m", "input": given, **fields}, headers=headers)


def result(call: Json) -> Json:
    """The tool, and its output as an item."""
    given = json.loads(call["arguments"])
    return {"type": "function_call_output", "call_id": call["call_id"], "output": str(given["a"] + given["b"])}


def text_of(response: Json) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts)


def events_of(text: str) -> list[Json]:
    """A stream's events, each of a name that is its data's type, and of a shape that OpenAI's SDK validates."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.splitlines()
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event)
        found.append(event)
    return found


def checked(events: list[Json]) -> Json:
    """The response that a stream's events amount to, in the order that OpenAI documents."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    left = list(events)
    for kind in ("response.created", "response.in_progress"):
        begun = left.pop(0)
        assert (begun["type"], begun["response"]["status"], begun["response"]["output"]) == (kind, "in_progress", [])
    output: list[Json] = []
    while left[0]["type"] == "response.output_item.added":
        output.append(_item(left, len(output)))
    (last,) = left
    response: Json = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert response["id"] == begun["response"]["id"]
    assert response["output"] == output
    return response


def _item(left: list[Json], index: int) -> Json:
    """One item from its beginning to its end."""
    added = left.pop(0)
    item: Json = added["item"]
    assert (added["output_index"], item["status"]) == (index, "in_progress")
    if item["type"] == "function_call":
        assert item["arguments"] == ""
        whole = _grown(left, item, index, "response.function_call_arguments", "arguments")
    else:
        part = left.pop(0)
        assert (part["type"], part["item_id"], part["part"]["text"]) == ("response.content_part.added", item["id"], "")
        kind = "response.reasoning_text" if item["type"] == "reasoning" else "response.output_text"
        whole = _grown(left, item, index, kind, "text")
        done = left.pop(0)
        assert (done["type"], done["part"]["text"]) == ("response.content_part.done", whole)
    done = left.pop(0)
    found: Json = done["item"]
    assert (done["type"], done["output_index"], found["id"]) == ("response.output_item.done", index, item["id"])
    assert (found["arguments"] if "arguments" in found else found["content"][0]["text"]) == whole
    return found


def _grown(left: list[Json], item: Json, index: int, kind: str, field: str) -> str:
    said = ""
    while (event := left.pop(0))["type"] == f"{kind}.delta":
        assert (event["item_id"], event["output_index"]) == (item["id"], index)
        said += event["delta"]
    assert (event["type"], event[field]) == (f"{kind}.done", said)
    return said
