"""Tokens of calls and conversations, held to what the engine says that it consumed and sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from tests.engine.kit import Client
from tests.gateway.kit import Evidence

from headrace.envs.server import APIServerConfig, ManagedServer, NoTokens, RequestRefused, SequenceNode, ServerManager

Json = dict[str, Any]
MASKED = -100


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def whole(call: Json) -> list[int]:
    return [*call["prompt_token_ids"], *call["token_ids"]]


def holds(node: SequenceNode, calls: list[Json]) -> None:
    """A sequence is these calls of the engine, one after the other: every sampled id trained on, nothing else."""
    assert node.tokens == whole(calls[-1])
    masks, log_probs = [MASKED] * len(node.tokens), [1.0] * len(node.tokens)
    for call in calls:
        assert node.tokens[: len(whole(call))] == whole(call)
        start = len(call["prompt_token_ids"])
        masks[start : start + len(call["token_ids"])] = call["token_ids"]
        log_probs[start : start + len(call["token_ids"])] = call["logprobs"]
    assert node.masked_tokens == masks
    assert node.logprobs == log_probs


# -- single calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["ids", "text"])
async def test_a_call_gives_the_ids_and_log_probs_of_the_engine(
    server: ServerManager, evidence: Evidence, tokenizer: Any, given: str
) -> None:
    """Three answers are two calls here, since one call is asked for two at most."""
    prompt = {"input_ids": [5, 6, 7]} if given == "ids" else {"prompt": "<|im_start|>user\nhi"}
    ids, outputs, log_probs, reasons = await server.tokens_and_logprobs_completion(**prompt, n=3, max_tokens=9)
    assert ids == ([5, 6, 7] if given == "ids" else tokenizer.encode("<|im_start|>user\nhi"))
    calls = evidence.calls()
    assert len(calls) == len(outputs) == len(reasons) == 3
    told = sorted((ids, out, values) for out, values in zip(outputs, log_probs, strict=True))
    assert told == sorted((call["prompt_token_ids"], call["token_ids"], call["logprobs"]) for call in calls)


async def test_a_prompt_without_a_tokenizer_is_read_by_the_server(engine: Client, evidence: Evidence) -> None:
    manager = ServerManager([APIServerConfig(base_url=f"http://{engine.host}/v1", model_name="tiny")])
    ids, (out,), (log_probs,), _ = await manager.tokens_and_logprobs_completion(prompt="hello", max_new_tokens=4)
    await manager.close()
    (call,) = evidence.calls()
    assert (ids, out, log_probs) == (call["prompt_token_ids"], call["token_ids"], call["logprobs"])
    assert len(out) <= 4


async def test_answers_look_like_those_of_openai_s_client(server: ServerManager, engine: Client) -> None:
    fields: Json = {"messages": [user("What now?")], "max_tokens": 8, "seed": 4, "n": 2, "logprobs": True}
    client = openai.AsyncOpenAI(base_url=f"http://{engine.host}/v1", api_key="x")
    theirs = await client.chat.completions.create(model="tiny", **fields)
    ours = await server.chat_completion(**fields)
    assert len(ours.choices) == 2
    for our, their in zip(ours.choices, theirs.choices, strict=True):
        assert (our.index, our.finish_reason) == (their.index, their.finish_reason)
        assert (our.message.role, our.message.content) == (their.message.role, their.message.content)
        assert our.logprobs is not None
        assert their.logprobs is not None
        assert our.logprobs.content is not None
        assert their.logprobs.content is not None
        assert [one.logprob for one in our.logprobs.content] == [one.logprob for one in their.logprobs.content]
    assert ours.usage is not None
    assert theirs.usage is not None
    assert ours.usage.completion_tokens == theirs.usage.completion_tokens
    text = await client.completions.create(model="tiny", prompt="Once", max_tokens=8, seed=4)
    same = await server.completion(prompt="Once", max_tokens=8, seed=4)
    assert (same.choices[0].text, same.object) == (text.choices[0].text, text.object)
    await client.close()


async def test_a_prompt_s_own_log_probs_come_in_the_server_s_order(server: ServerManager, engine: Client) -> None:
    found = await server.get_logprobs(input_ids=[5, 6, 7, 8], top_k=3)
    told = engine.complete([5, 6, 7, 8], prompt_logprobs=3, max_tokens=1)["prompt_logprobs"]
    assert found["prompt_tokens"] == [5, 6, 7, 8]
    assert found["prompt_topk_token_ids"][0] == found["prompt_topk_logprobs"][0] == []
    for ids, values, row in zip(
        found["prompt_topk_token_ids"][1:], found["prompt_topk_logprobs"][1:], told[1:], strict=True
    ):
        assert list(zip(ids, values, strict=True)) == [(int(token), entry["logprob"]) for token, entry in row.items()]


async def test_what_the_engine_refuses_is_raised_in_its_words(server: ServerManager, evidence: Evidence) -> None:
    with pytest.raises(RequestRefused, match="temperature") as refused:
        await server.chat_completion(messages=[user("x")], temperature=-1)
    assert refused.value.status == 400
    assert evidence.calls() == []


# -- conversations -----------------------------------------------------------------------------------------------------


async def test_a_conversation_of_many_turns_is_one_sequence(server: ServerManager, evidence: Evidence) -> None:
    messages = [{"role": "system", "content": "Guess größer 🙂."}]
    async with server.managed_server() as managed:
        for turn in range(4):
            messages.append(user(f"turn {turn}"))
            answer = await managed.chat_completion(messages=messages, max_tokens=7, temperature=1.0, seed=turn)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        (node,) = managed.get_state()["nodes"]
    holds(node, evidence.calls())
    assert node.metadata is not None
    assert node.metadata["finish_reason"] in ("stop", "length")


async def test_answers_of_one_call_are_sequences_that_go_on_apart(server: ServerManager, evidence: Evidence) -> None:
    async with server.managed_server() as managed:
        first = await managed.chat_completion(messages=[user("a")], n=3, max_tokens=6, seed=0)
        opening = evidence.calls()
        assert len(managed.get_state()["nodes"]) == 3
        said = first.choices[1].message.content
        history = [user("a"), {"role": "assistant", "content": said}, user("b")]
        await managed.chat_completion(messages=history, max_tokens=6, seed=0)
        nodes = managed.get_state()["nodes"]
    second = evidence.calls()[-1]
    assert len(nodes) == 3
    longest = max(nodes, key=lambda node: len(node.tokens))
    begun = next(call for call in opening if second["prompt_token_ids"][: len(whole(call))] == whole(call))
    holds(longest, [begun, second])
    rest = [call for call in opening if call is not begun]
    for node in nodes:
        if node is not longest:
            assert node.tokens in [whole(call) for call in rest]


async def test_a_history_that_was_rewritten_begins_a_sequence(server: ServerManager, evidence: Evidence) -> None:
    async with server.managed_server() as managed:
        await managed.chat_completion(messages=[user("a")], max_tokens=6, seed=0)
        rewritten = [user("a"), {"role": "assistant", "content": "never said"}, user("b")]
        await managed.chat_completion(messages=rewritten, max_tokens=6, seed=0)
        nodes = managed.get_state()["nodes"]
    for node, call in zip(nodes, evidence.calls(), strict=True):
        holds(node, [call])


async def test_text_is_continued_from_its_ids(server: ServerManager, evidence: Evidence) -> None:
    text = "Once upon"
    async with server.managed_server() as managed:
        for more in (" a time", ", and then"):
            answer = await managed.completion(prompt=text, max_tokens=5)
            text += answer.choices[0].text + more
        await managed.completion(prompt=text, max_tokens=5)
        (node,) = managed.get_state()["nodes"]
    holds(node, evidence.calls())


async def test_a_tree_keeps_every_turn(server: ServerManager, evidence: Evidence) -> None:
    async with server.managed_server(track_tree=True) as managed:
        answer = await managed.chat_completion(messages=[user("a")], max_tokens=6, seed=0)
        history = [user("a"), {"role": "assistant", "content": answer.choices[0].message.content}, user("b")]
        await managed.chat_completion(messages=history, max_tokens=6, seed=0)
        tree = managed.get_state()["tree"]
    calls = evidence.calls()
    first, second = sorted(tree.values(), key=lambda node: len(node.tokens))
    holds(first, calls[:1])
    holds(second, calls)


async def test_the_beginning_of_an_answer_is_gone_on_with(
    server: ServerManager, evidence: Evidence, tokenizer: Any
) -> None:
    async with server.managed_server() as managed:
        await managed.chat_completion(messages=[user("a"), {"role": "assistant", "content": "I say"}], max_tokens=4)
        (node,) = managed.get_state()["nodes"]
    (call,) = evidence.calls()
    assert tokenizer.decode(call["prompt_token_ids"]).endswith("assistant\nI say")
    holds(node, [call])


async def test_a_text_reads_as_it_was_said_and_tokens_stay_whole(
    server: ServerManager, evidence: Evidence, tokenizer: Any
) -> None:
    """A special token that was sampled ends the ids, not the text; in a prompt it is written as the template has it."""
    end = tokenizer.eos_token_id
    sampling: Json = {"max_tokens": 9, "min_tokens": 2, "allowed_token_ids": [67, end], "logit_bias": {end: 100}}
    said = tokenizer.decode([67, 67])
    async with server.managed_server() as managed:
        messages = [user("a")]
        for turn in range(2):
            answer = await managed.chat_completion(messages=messages, **sampling)
            assert answer.choices[0].message.content == said
            (node,) = managed.get_state()["nodes"]
            call = evidence.calls()[turn]
            assert node.full_text == tokenizer.decode(call["prompt_token_ids"]) + said
            assert node.tokens[-3:] == [67, 67, end]
            messages += [{"role": "assistant", "content": said}, user("b")]
        assert node.full_text.count(said + tokenizer.eos_token) == 1, "the first turn's, in the second one's prompt"
    holds(node, evidence.calls())
    async with server.managed_server() as managed:
        text = "Once"
        for _ in range(2):
            answer = await managed.completion(prompt=text, **sampling)
            (node,) = managed.get_state()["nodes"]
            assert node.full_text == text + said
            text += said + " more"
    holds(node, evidence.calls()[2:])


async def test_where_calls_are_parsed_a_text_keeps_the_tokens_that_they_may_be_written_with(
    engine: Client, tokenizer: Any
) -> None:
    end = tokenizer.eos_token_id
    config = APIServerConfig(base_url=f"http://{engine.host}/v1", model_name="tiny", server_type="vllm")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    texts = []
    for parser in (None, "hermes"):
        manager = ServerManager([config], tokenizer=tokenizer, tool_parser=parser)
        async with manager.managed_server() as managed:
            await managed.chat_completion(messages=[user("a")], tools=[tool], max_tokens=1, allowed_token_ids=[end])
            (node,) = managed.get_state()["nodes"]
            texts.append(node.full_text)
        await manager.close()
    assert texts[1] == texts[0] + tokenizer.eos_token


async def test_sessions_beside_each_other_do_not_mix(server: ServerManager, evidence: Evidence) -> None:
    async def rollout(number: int) -> SequenceNode:
        messages = [user(f"rollout {number}")]
        async with server.managed_server() as managed:
            assert isinstance(managed, ManagedServer)
            for _ in range(3):
                # Seeded: an answer whose bytes are no text would not come back as it was, and begin another sequence.
                answer = await managed.chat_completion(messages=messages, max_tokens=5, seed=number)
                messages += [{"role": "assistant", "content": answer.choices[0].message.content}, user("on")]
            (node,) = managed.get_state()["nodes"]
        found: SequenceNode = node
        return found

    nodes = await asyncio.gather(*map(rollout, range(4)))
    calls = evidence.calls()
    assert len(calls) == 12
    for node in nodes:
        holds(node, [call for call in calls if node.tokens[: len(whole(call))] == whole(call)])


async def test_a_server_that_tells_no_tokens_is_an_error_that_says_what_to_use(
    engine: Client, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Placeholders are given only to who asks for them."""
    config = APIServerConfig(base_url=f"http://{engine.host}/v1", model_name="tiny")
    manager = ServerManager([config], tokenizer=tokenizer)
    (only,) = manager.servers
    sent = only.http.post  # type: ignore[attr-defined]

    async def silent(url: str, body: Json, **options: Any) -> Json:
        found: Json = await sent(url, body, **options)
        for choice in found["choices"]:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
        return found

    monkeypatch.setattr(only.http, "post", silent)  # type: ignore[attr-defined]
    async with manager.managed_server() as managed:
        with pytest.raises(NoTokens, match="vLLM"):
            await managed.chat_completion(messages=[user("a")], max_tokens=2)
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "1")
    session = manager.managed_server()
    with pytest.warns(UserWarning, match="placeholders"):
        managed = await session.__aenter__()
    await managed.chat_completion(messages=[user("a")], max_tokens=2)
    (node,) = managed.get_state()["nodes"]
    await session.__aexit__(None, None, None)
    assert node.metadata is not None
    assert node.metadata["dummy_tokens"]
    await manager.close()
