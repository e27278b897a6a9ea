"""What the route does not take: Anthropic's error, by its SDK's own exceptions, and nothing recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from tests.gateway.kit import Json, Running, running_gateway, told
from tests.gateway.messages.kit import settled
from tests.gateway.rollout import Rollout, answers, in_front

from headrace import DataPool

ASK: Json = {"model": "any", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
CALL: Json = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
RESULT: Json = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
PICTURE: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
TOOL: Json = {"name": "f", "input_schema": {"type": "object"}}


def said(*content: Any) -> Json:
    return {"messages": [{"role": "user", "content": list(content)}]}


def after(answer: Any, *content: Any) -> Json:
    """A user's turn behind an answer."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    return {"messages": [*turns, {"role": "user", "content": list(content) or "go on"}]}


BAD: list[tuple[Json, str]] = [
    ({"messages": []}, "at least one message"),
    ({"messages": "hi"}, "messages must be a list"),
    ({"messages": ["hi"]}, "messages[0] must be an object"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "'wizard'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content must be a string or a list"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string or a list"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "So"}]}, "prefill"),
    (said("hi"), "messages[0].content[0] must be an object with a type"),
    (said({"type": 3}), "messages[0].content[0] must be an object with a type"),
    (said({"type": "text"}), "messages[0].content[0].text must be a string"),
    (said({"type": "poem", "text": "x"}), "'poem'"),
    (said(PICTURE), "source.data is no image that can be read"),
    (said({"type": "document", "source": {}}), "'document'; only text"),
    (said(CALL), "'tool_use'; only text"),
    (said(RESULT), "messages[0].content[0].tool_use_id is 'a', which no tool_use"),
    (after([CALL], {**RESULT, "tool_use_id": "b"}), "messages[2].content[0].tool_use_id is 'b'"),
    (after([CALL], {**RESULT, "tool_use_id": 3}), "messages[2].content[0].tool_use_id must be a string"),
    (after([CALL], {**RESULT, "content": [PICTURE]}), "messages[2].content[0].content[0].source.data is no image"),
    (after([CALL], {**RESULT, "content": 5}), "messages[2].content[0].content must be"),
    (after([CALL], {**RESULT, "is_error": "yes"}), "is_error must be true or false"),
    (after([{**CALL, "input": "{}"}]), "messages[1].content[0].input must be an object"),
    (after([{**CALL, "name": None}]), "messages[1].content[0].name must be a string"),
    (after([{**CALL, "id": 1}]), "messages[1].content[0].id must be a string"),
    (after([{"type": "thinking", "signature": "x"}]), "messages[1].content[0].thinking must be a string"),
    (after([{"type": "redacted_thinking"}]), "messages[1].content[0].data must be a string"),
    (after([{"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}]), "'server_tool_use'"),
    (after([RESULT]), "'tool_result'; only text"),
    ({"messages": [{"role": "system", "content": [PICTURE]}]}, "'image'; only text"),
    ({"system": 5}, "system must be a string or a list"),
    ({"system": [PICTURE]}, "system[0] is a block of type 'image'"),
    ({"tools": {}}, "tools must be a list"),
    ({"tools": ["f"]}, "tools[0] must be an object"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name must be a string"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema must be a JSON schema"),
    ({"tools": [{**TOOL, "description": 5}]}, "tools[0].description must be a string"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice is 'auto'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice names 'g'"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "disable_parallel_tool_use"),
    ({"thinking": {"type": "hard"}}, "thinking is"),
    ({"thinking": True}, "thinking is True"),
    ({"stop_sequences": "END"}, "stop_sequences must be a list"),
    ({"stop_sequences": [""]}, "stop_sequences must be a list"),
    ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"temperature": "hot"}, "temperature must be a number"),
    ({"top_k": 1.5}, "top_k must be an integer"),
    ({"stream": "yes"}, "stream must be true or false"),
    ({"metadata": "me"}, "metadata must be an object"),
    ({"metadata": {"user_id": 5}}, "user_id must be a string"),
    ({"model": 5}, "model must be a string"),
    ({"output_config": {"format": {"type": "poem"}}}, "output_config.format is"),
    ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers: tools of MCP servers"),
]


@pytest.fixture(scope="module")
def gateway(shared: Rollout, folder: Path) -> Iterator[Running]:
    with in_front(shared, folder) as found:
        yield found


@pytest.mark.parametrize(("change", "words"), BAD, ids=[words for _, words in BAD])
def test_what_is_malformed_is_named(gateway: Running, rollout: Rollout, change: Json, words: str) -> None:
    begun = gateway.init()
    answer = gateway.post(f"{begun['base_url']}/v1/messages", {**ASK, **change})
    assert answer.status_code == 400
    assert answer.headers["request-id"].startswith("req_")
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert words in body["error"]["message"]
    assert gateway.steps(begun["trajectory_uid"]) == []
    assert rollout.orders == []
    if change.keys() & {"messages", "system", "tools", "thinking"}:
        counted = gateway.post(f"{begun['base_url']}/v1/messages/count_tokens", {**ASK, **change})
        assert (counted.status_code, counted.json()["error"]) == (400, body["error"])


@pytest.mark.parametrize("body", [b"{", b"[]", b"", b'{"messages": ' + b"[" * 2000])
def test_a_body_that_is_no_object_is_refused(gateway: Running, rollout: Rollout, body: bytes) -> None:
    for route in ("messages", "messages/count_tokens"):
        answer = gateway.post(f"{gateway.init()['base_url']}/v1/{route}", body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("stream", [False, True])
def test_trouble_is_the_sdk_s_own_exception(gateway: Running, rollout: Rollout, stream: bool) -> None:
    begun = gateway.init()
    with anthropic.Anthropic(**settled(begun["base_url"])) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long") as long:
            client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "x " * 200_000}]}, stream=stream)
        assert long.value.request_id == long.value.response.headers["request-id"]
        rollout.script.append(answers(400, {"error": {"message": "not today", "type": "BadRequestError", "code": 400}}))
        with pytest.raises(anthropic.BadRequestError, match="not today"):
            client.messages.create(**ASK, stream=stream)
        assert gateway.steps(begun["trajectory_uid"]) == []
        client.messages.create(**ASK)
        gateway.complete(begun["trajectory_uid"], reward=1.0)
        with pytest.raises(anthropic.ConflictError, match="complete"):
            client.messages.create(**ASK, stream=stream)
        with pytest.raises(anthropic.NotFoundError, match="there is no"):
            client.messages.batches.create(requests=[])
    with anthropic.Anthropic(**settled(f"{gateway.address}/nobody/nothing")) as client:
        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            client.messages.create(**ASK, stream=stream)
        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            client.messages.count_tokens(model="any", messages=ASK["messages"])


def test_a_wrong_key_is_an_authentication_error(pool: DataPool, rollout: Rollout, folder: Path) -> None:
    with running_gateway(pool, rollout.address, folder, api_key="right") as gateway:
        told(gateway.post("/init_trajectory", {"trajectory_uid": "t"}, headers={"x-api-key": "right"}))
        for key, refused in (("wrong", True), ("right", False)):
            with anthropic.Anthropic(**settled(f"{gateway.address}/t/t", api_key=key)) as client:
                for call in (client.messages.create, client.messages.count_tokens):
                    asked = ASK if call == client.messages.create else {**ASK, "max_tokens": None}
                    given = {name: value for name, value in asked.items() if value is not None}
                    if refused:
                        with pytest.raises(anthropic.AuthenticationError, match="needs an API key"):
                            call(**given)
                    else:
                        call(**given)
        assert len(gateway.steps("t")) == 1
