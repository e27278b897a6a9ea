"""An environment's conversation with a real vLLM: the tokens and log-probs that it keeps are the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.kit import Client, Reference, gap
from tests.vllm.kit import TOLERANCE

from headrace.envs.server import APIServerConfig, ServerManager

MASKED = -100


async def test_a_conversation_keeps_what_was_sampled(theirs: Client, reference: Reference, folder: Path) -> None:
    from transformers import AutoTokenizer

    config = APIServerConfig(base_url=f"http://{theirs.host}/v1", model_name="tiny", server_type="vllm")
    manager = ServerManager([config], tokenizer=AutoTokenizer.from_pretrained(str(folder)))
    messages: list[Any] = [{"role": "user", "content": "guess a number"}]
    async with manager.managed_server() as managed:
        for _ in range(3):
            answer = await managed.chat_completion(messages=messages, max_tokens=6, temperature=1.0)
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "higher"}]
        (node,) = managed.get_state()["nodes"]
    await manager.close()
    trained = [at for at, label in enumerate(node.masked_tokens) if label != MASKED]
    assert 3 <= len(trained) <= 18
    whole = reference.logprobs(node.tokens[:1], node.tokens[1:])
    assert gap([node.logprobs[at] for at in trained], [whole[at - 1] for at in trained]) < TOLERANCE
    assert all(node.logprobs[at] == 1.0 for at in set(range(len(node.tokens))) - set(trained))
