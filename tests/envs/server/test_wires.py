"""Servers that are not asked in vLLM's words, and configurations that come to several servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.site import Site

from headrace.envs.server import (
    APIServerConfig,
    ManagedServerAdapter,
    NoServerAvailable,
    NoTokens,
    ReasoningConfig,
    ServerBaseline,
    ServerHarness,
    ServerManager,
    create_chat_completion,
)
from headrace.envs.server.config import server_configs

Json = dict[str, Any]
Serve = Callable[[str, Callable[[Json], Any]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """One route that answers as told; its address."""
    sites = []

    async def started(path: str, answer: Callable[[Json], Any]) -> str:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(answer(await request.json()))

        site = Site(web.post(path, handle))
        sites.append(site)
        return f"http://127.0.0.1:{await site.start()}"

    yield started
    for site in sites:
        await site.end()


async def test_sglang_is_asked_for_ids_and_tells_what_it_sampled(serve: Serve, tokenizer: Any) -> None:
    asked: list[Json] = []

    def answer(body: Json) -> list[Json]:
        asked.append(body)
        rows = [[-0.5, 40, None], [-0.25, 41, None]]
        ends: list[Any] = [{"type": "length", "length": 2}, {"type": "stop", "matched": 41}]
        return [{"text": "x", "meta_info": {"output_token_logprobs": rows, "finish_reason": end}} for end in ends]

    address = await serve("/generate", answer)
    config = APIServerConfig(base_url=f"{address}/v1", server_type="sglang", model_name="m")
    manager = ServerManager([config], tokenizer=tokenizer)
    found = await manager.tokens_and_logprobs_completion(input_ids=[5, 6], n=2, max_tokens=2, temperature=0.7)
    await manager.close()
    assert found == ([5, 6], [[40, 41]] * 2, [[-0.5, -0.25]] * 2, ["length", "stop"])
    sampling = {"n": 2, "max_new_tokens": 2, "temperature": 0.7}
    assert asked == [{"input_ids": [5, 6], "sampling_params": sampling, "return_logprob": True}]


async def test_trl_takes_text_and_must_have_read_the_same_ids(serve: Serve, tokenizer: Any) -> None:
    def answer(body: Json) -> Json:
        ids = [tokenizer.encode(body["prompts"][0])]
        sampled = [[*tokenizer.encode("so"), tokenizer.eos_token_id]]
        return {"prompt_ids": ids, "completion_ids": sampled, "logprobs": [[-0.5] * len(sampled[0])]}

    address = await serve("/generate/", answer)
    manager = ServerManager([APIServerConfig(base_url=address, server_type="trl")], tokenizer=tokenizer)
    prompt, (ids,), (log_probs,), reasons = await manager.tokens_and_logprobs_completion(prompt="Once", max_tokens=4)
    assert (prompt, reasons) == (tokenizer.encode("Once"), ["stop"])
    assert len(ids) == len(log_probs)
    answered = await manager.chat_completion(messages=[{"role": "user", "content": "a"}])
    assert answered.choices[0].message.content == "so"
    split = [tokenizer.encode(char)[0] for char in "guess"]  # not how the text "guess" is read
    with pytest.raises(NoTokens, match="other tokens"):
        await manager.tokens_and_logprobs_completion(input_ids=split)
    await manager.close()


def test_a_baseline_stands_for_the_four_servers_of_a_node() -> None:
    found = server_configs(ServerBaseline(model_name="m", timeout=7))
    assert [config.base_url for config in found] == [f"http://localhost:{port}/v1" for port in range(9004, 9008)]
    assert {(config.model_name, config.timeout) for config in found} == {("m", 7)}
    one = APIServerConfig(base_url="http://there:1/v1")
    assert server_configs(one) == server_configs([one]) == [one]


def test_on_slurm_every_node_that_does_not_train_has_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "scontrol"
    script.write_text("#!/bin/sh\nprintf 'a\\nb\\nc\\n'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "[a-c]")
    monkeypatch.setenv("NUM_TRAINING_NODES", "2")
    monkeypatch.setenv("INFER_TP", "4")
    found = server_configs([APIServerConfig(model_name="m")], slurm=True)
    assert [config.base_url for config in found] == ["http://c:9000/v1", "http://c:9001/v1"]
    monkeypatch.delenv("NUM_TRAINING_NODES")
    with pytest.raises(ValueError, match="NUM_TRAINING_NODES"):
        server_configs([APIServerConfig(model_name="m")], slurm=True)


async def test_without_a_server_a_call_says_how_to_configure_one() -> None:
    with pytest.raises(NoServerAvailable, match="base_url"):
        await ServerManager([]).chat_completion(messages=[])
    with pytest.raises(NoServerAvailable, match="base_url"):
        async with ServerManager([]).managed_server():
            pass


async def test_the_harness_answers_what_it_was_told() -> None:
    manager = ServerManager(ServerBaseline(), testing=True)
    (harness,) = manager.servers
    assert isinstance(harness, ServerHarness)
    asked = [{"role": "user", "content": "hi"}]
    harness.set_desired_response(asked, create_chat_completion(["a", "b"], n=2))
    for _ in range(2):
        found = await manager.chat_completion(messages=asked, n=2)
        assert [choice.message.content for choice in found.choices] == ["a", "b"]
    with pytest.raises(ValueError, match="not told what to answer"):
        await manager.chat_completion(messages=[{"role": "user", "content": "who?"}])


async def test_a_session_can_stand_in_for_openai_s_client() -> None:
    harness = ServerHarness()
    asked = [{"role": "user", "content": "hi"}]
    harness.set_desired_response(asked, create_chat_completion("yes"))
    client = ManagedServerAdapter(harness, "http://there/v1")
    answer = await client.chat.completions.create(messages=asked)
    assert answer.choices[0].message.content == "yes"
    with pytest.raises(NotImplementedError, match="/tokenize"):
        await client.post("/tokenize")


@pytest.mark.parametrize(
    ("asked", "url", "body"),
    [
        ({}, "http://there/v1", None),
        ({"enabled": True}, "http://there/v1", {"reasoning": {"enabled": True}}),
        ({"effort": "low"}, "http://there/v1", {"reasoning": {"enabled": True, "effort": "low"}}),
        ({"max_tokens": 2048}, "http://there/v1", {"reasoning": {"enabled": True, "max_tokens": 2048}}),
        ({"effort": "low"}, "https://api.openai.com/v1", {"reasoning_effort": "low"}),
    ],
)
async def test_reasoning_is_asked_for_in_the_provider_s_words(asked: Json, url: str, body: Json | None) -> None:
    reasoning = ReasoningConfig(**asked)
    assert reasoning.build_extra_body(url) == body
    found = reasoning.injected({"messages": [], "max_tokens": 9}, url)
    official = body is not None and "openai" in url
    assert found.get("extra_body") == body
    assert (found.get("temperature"), found.get("max_completion_tokens")) == ((1.0, 9) if official else (None, None))


async def test_a_call_may_go_without_reasoning(serve: Serve) -> None:
    asked: list[Json] = []

    def answer(body: Json) -> Json:
        asked.append(body)
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}]}

    address = await serve("/v1/chat/completions", answer)
    manager = ServerManager(
        [APIServerConfig(base_url=f"{address}/v1")], reasoning_config=ReasoningConfig(effort="high")
    )
    for skip in (False, True):
        await manager.chat_completion(messages=[{"role": "user", "content": "a"}], skip_reasoning=skip)
    await manager.close()
    assert [body.get("reasoning") for body in asked] == [{"enabled": True, "effort": "high"}, None]
