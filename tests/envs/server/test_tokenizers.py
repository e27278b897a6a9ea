"""Tokenizers that are known by their methods alone, as tests of environments make them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine.kit import Client
from tests.gateway.kit import Evidence

from headrace.data.errors import InvalidInput
from headrace.envs.server import APIServerConfig, ManagedServer, ServerHarness, ServerManager

Json = dict[str, Any]


class Letters:
    """One token a character, a begin-of-text before a prompt, and 2 as the end of an answer."""

    bos_token_id, eos_token_id = 1, 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.bos_token_id] * add_special_tokens + [ord(char) for char in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        special = {1: "", 2: ""} if skip_special_tokens else {1: "<s>", 2: "</s>"}
        return "".join(special.get(token, chr(token)) for token in ids)

    def apply_chat_template(self, messages: list[Json], tokenize: bool, add_generation_prompt: bool) -> str:
        said = "".join(f"[{message['role']}]{message['content']}</s>" for message in messages)
        return said + "[assistant]" * add_generation_prompt


class Without:
    """One that lacks a method."""

    def __init__(self, name: str) -> None:
        self._tokenizer, self._name = Letters(), name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def user(text: str) -> Json:
    return {"role": "user", "content": text}


async def test_its_turns_are_one_sequence_of_the_ids_that_were_sampled() -> None:
    harness, letters = ServerHarness(), Letters()
    harness.tokenizer = letters
    first = "[user]a</s>[assistant]"
    second = first + "yes</s>[user]b</s>[assistant]"
    sampled = [ord("y"), ord("e"), ord("s"), 2]
    harness.set_tokens_and_logprobs_response(first, letters.encode(first), [sampled], [[-0.5] * 4], ["stop"])
    # </s> is one token where it was sampled, and four where it is read.
    ids = [*letters.encode(first), *sampled, *letters.encode(second[len(first) + len("yes</s>") :], False)]
    harness.set_tokens_and_logprobs_response(second, ids, [[ord("n")]], [[-0.25]], ["length"])
    managed = ManagedServer(harness)
    answer = await managed.chat_completion(messages=[user("a")])
    assert answer.choices[0].message.content == "yes"
    said = {"role": "assistant", "content": "yes"}
    await managed.chat_completion(messages=[user("a"), said, user("b")])
    (node,) = managed.get_state()["nodes"]
    assert node.tokens == [*ids, ord("n")]
    assert [token for token in node.masked_tokens if token != -100] == [*sampled, ord("n")]
    assert node.full_text == second + "n"


async def test_its_ids_are_what_a_server_is_sent(engine: Client, evidence: Evidence) -> None:
    config = APIServerConfig(base_url=f"http://{engine.host}/v1", model_name="tiny", server_type="vllm")
    manager, letters = ServerManager([config]), Letters()
    async with manager.managed_server(tokenizer=letters) as managed:
        await managed.chat_completion(messages=[user("a")], max_tokens=3, allowed_token_ids=[97], ignore_eos=True)
        (node,) = managed.get_state()["nodes"]
    await manager.close()
    (call,) = evidence.calls()
    assert call["prompt_token_ids"] == letters.encode("[user]a</s>[assistant]")
    assert (node.tokens, node.full_text) == ([*call["prompt_token_ids"], 97, 97, 97], "[user]a</s>[assistant]aaa")


@pytest.mark.parametrize("missing", ["encode", "decode", "apply_chat_template"])
async def test_a_missing_method_is_named(missing: str) -> None:
    with pytest.raises(InvalidInput, match=rf"Without has no {missing}; a managed conversation needs encode\(text"):
        await ManagedServer(ServerHarness(), tokenizer=Without(missing)).chat_completion(messages=[user("a")])


async def test_tools_need_a_template_that_is_known() -> None:
    managed = ManagedServer(ServerHarness(), tokenizer=Letters())
    with pytest.raises(InvalidInput, match=r"tools .* need a fast tokenizer .* Letters is none"):
        await managed.chat_completion(messages=[user("a")], tools=[{"type": "function", "function": {"name": "f"}}])


async def test_a_harness_that_was_told_nothing_of_log_probs_has_none() -> None:
    with pytest.raises(NotImplementedError, match="ServerHarness does not implement get_logprobs"):
        await ManagedServer(ServerHarness(), tokenizer=Letters()).get_logprobs(messages=[user("a")])
