"""The wire between Atropos' environments and its vLLM server, with the original at either end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.atropos.server import running
from tests.engine.kit import rollout_engine

from headrace.envs.server import APIServerConfig, NoTokens, RequestRefused, ServerManager

INSIDE = Path(__file__).parent / "inside"
RUN_S = 240


def test_the_original_s_client_takes_its_tokens_from_our_engine(atropos: Path, folder: Path) -> None:
    with rollout_engine(folder) as engine:
        given = {"base_url": f"http://{engine.host}/v1", "tokenizer": str(folder), "input_ids": [5, 6, 7]}
        command = [str(atropos), str(INSIDE / "vllm_client.py"), json.dumps(given)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
        assert ran.returncode == 0, ran.stderr
        found = json.loads(ran.stdout.splitlines()[-1])
        calls = engine.get("/debug/calls")["calls"]
        told = engine.complete([5, 6, 7], prompt_logprobs=2, max_tokens=1)["prompt_logprobs"]
    prompt, ids, log_probs, reasons = found["sampled"]
    two = sorted(calls[:2], key=lambda call: int(call["index"]))
    assert prompt == [5, 6, 7]
    assert ids == [call["token_ids"] for call in two]
    assert log_probs == [call["logprobs"] for call in two]
    assert reasons == [call["finish_reason"] for call in two]
    rows = [[(int(token), entry["logprob"]) for token, entry in (row or {}).items()] for row in told]
    assert found["logprobs"]["prompt_topk_token_ids"] == [[token for token, _ in row] for row in rows]
    assert found["logprobs"]["prompt_topk_logprobs"] == [[value for _, value in row] for row in rows]
    # Two turns: the last call is the last node's prompt and answer, whatever it made of the first.
    last = calls[-1]
    assert found["nodes"][-1]["tokens"] == last["prompt_token_ids"] + last["token_ids"]


@pytest.fixture
def vllm(atropos: Path, tmp_path: Path) -> Iterator[str]:
    """The original's server, around a vLLM that answers with the prompt's ids from the last to the first."""
    with running([str(INSIDE / "vllm_api_server.py")], tmp_path / "vllm.log", "/health") as address:
        yield address


async def test_our_environments_take_their_tokens_from_the_original_s_server(vllm: str, folder: Path) -> None:
    config = APIServerConfig(
        base_url=f"{vllm}/v1", model_name="m", tokenizer_name=str(folder), server_type="vllm", max_attempts=1
    )
    manager = ServerManager([config])
    found = await manager.tokens_and_logprobs_completion(input_ids=[5, 6, 7], n=2, max_tokens=2, temperature=0.7)
    assert found == ([5, 6, 7], [[7, 6]] * 2, [[-0.5] * 2, [-1.5] * 2], ["length"] * 2)
    async with manager.managed_server() as managed:
        await managed.chat_completion(messages=[{"role": "user", "content": "hi"}], max_tokens=3)
        (node,) = managed.get_state()["nodes"]
    prompt = node.tokens[:-3]
    assert node.tokens[-3:] == prompt[:-4:-1]
    assert node.logprobs == [1.0] * len(prompt) + [-0.5] * 3
    with pytest.raises(RequestRefused, match=r"/generate alone.*managed_server\(\)"):
        await manager.chat_completion(messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(NoTokens, match="without prompt_logprobs"):
        await manager.get_logprobs(input_ids=[5, 6, 7], top_k=2)
    await manager.close()
