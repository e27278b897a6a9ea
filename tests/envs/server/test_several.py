"""Several servers: who takes a call, and what becomes of it when a server dies, is busy or refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.rollout import Rollout, Say, answers, log_probs_of, scripted, user

from headrace.data.errors import InvalidInput
from headrace.envs.server import (
    APIServer,
    APIServerConfig,
    NoServerAvailable,
    RequestRefused,
    ServerManager,
    Unavailable,
)
from headrace.envs.server.concurrency import Signal

PATIENCE_S = 60
Make = Callable[..., ServerManager]


@pytest.fixture
def one(folder: Path) -> Iterator[Rollout]:
    with scripted(folder) as found:
        yield found


@pytest.fixture
def two(folder: Path) -> Iterator[Rollout]:
    with scripted(folder) as found:
        yield found


@pytest.fixture
async def make(tokenizer: Any) -> AsyncIterator[Make]:
    """Managers of scripted servers; retries come at once."""
    made: list[ServerManager] = []

    def manager(*rollouts: Rollout, **fields: Any) -> ServerManager:
        weights = fields.pop("weights", [1.0] * len(rollouts))
        configs = [
            APIServerConfig(
                base_url=f"{rollout.address}/v1",
                model_name="scripted",
                server_type="vllm",
                weight=weight,
                **{"retry_s": 0, "probe_s": 0.005, **fields},
            )
            for rollout, weight in zip(rollouts, weights, strict=True)
        ]
        made.append(ServerManager(configs, tokenizer=tokenizer))
        return made[-1]

    yield manager
    for found in made:
        await found.close()


async def until(holds: Callable[[], bool], server: APIServer) -> None:
    """Returns once something holds of a server that says when it changes."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await Signal.any_of([server.changed])


async def say(manager: ServerManager, **fields: Any) -> list[int]:
    _, (ids,), _, _ = await manager.tokens_and_logprobs_completion(**{"input_ids": [5, 6], "max_tokens": 16, **fields})
    return ids


async def test_calls_go_to_who_has_least_to_do(make: Make, one: Rollout, two: Rollout) -> None:
    gate = one.gate(), two.gate()
    one.reply, two.reply = (lambda asked: Say(at=gate[0])), (lambda asked: Say(at=gate[1]))
    manager = make(one, two)
    calls = [asyncio.create_task(say(manager)) for _ in range(6)]
    for rollout in (one, two):
        await asyncio.to_thread(rollout.until, lambda rollout=rollout: len(rollout.orders) == 3)
    for held in gate:
        held.open()
    await asyncio.gather(*calls)


async def test_a_weight_is_a_share_of_the_calls(make: Make, one: Rollout, two: Rollout) -> None:
    gate = one.gate(), two.gate()
    one.reply, two.reply = (lambda asked: Say(at=gate[0])), (lambda asked: Say(at=gate[1]))
    manager = make(one, two, weights=[3.0, 1.0])
    calls = [asyncio.create_task(say(manager)) for _ in range(8)]
    await asyncio.to_thread(one.until, lambda: len(one.orders) == 6)
    await asyncio.to_thread(two.until, lambda: len(two.orders) == 2)
    for held in gate:
        held.open()
    await asyncio.gather(*calls)


async def test_calls_on_a_server_that_dies_are_made_again_on_another(make: Make, one: Rollout, two: Rollout) -> None:
    gate = one.gate()
    one.reply = lambda asked: Say("from one", at=gate)
    two.reply = lambda asked: Say("from two")
    manager = make(one, two)
    calls = [asyncio.create_task(say(manager)) for _ in range(8)]
    await asyncio.to_thread(gate.reached)
    await asyncio.to_thread(one.die)
    expected = [*two.vocabulary.encode("from two"), two.end]
    assert await asyncio.gather(*calls) == [expected] * 8
    dead, alive = manager.servers
    assert (dead.server_healthy, alive.server_healthy) == (False, True)
    assert (dead.sem.in_flight, alive.sem.in_flight) == (0, 0)
    one.reply = lambda asked: Say("from one")
    await asyncio.to_thread(one.revive)
    await until(lambda: dead.server_healthy, dead)
    found = await asyncio.gather(*(say(manager) for _ in range(4)))
    assert [*one.vocabulary.encode("from one"), one.end] in found


async def test_a_conversation_outlives_its_server(make: Make, one: Rollout, two: Rollout) -> None:
    one.reply = two.reply = lambda asked: Say("said")
    manager = make(one, two)
    messages = [user("hi")]
    async with manager.managed_server(base_url=f"{one.address}/v1") as managed:
        for turn in range(3):
            if turn == 2:
                await asyncio.to_thread(one.die)
            answer = await managed.chat_completion(messages=messages, max_tokens=16)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, user("on")]
        (node,) = managed.get_state()["nodes"]
    assert (len(one.orders), len(two.orders)) == (2, 1)
    sampled = [*one.vocabulary.encode("said"), one.end]
    before = one.orders[1]["prompt"] + sampled
    assert two.orders[0]["prompt"][: len(before)] == before
    assert node.tokens == two.orders[0]["prompt"] + sampled
    assert [token for token in node.masked_tokens if token != -100] == sampled * 3
    assert [value for value in node.logprobs if value != 1.0] == log_probs_of(sampled) * 3


async def test_a_call_waits_for_a_server_that_comes_back(make: Make, one: Rollout) -> None:
    manager = make(one)
    await asyncio.to_thread(one.die)
    call = asyncio.create_task(say(manager))
    (server,) = manager.servers
    await until(lambda: not server.server_healthy, server)
    await asyncio.to_thread(one.revive)
    assert await call == [*one.vocabulary.encode("ok"), one.end]


async def test_when_none_comes_back_each_is_named_with_its_trouble(make: Make, one: Rollout, two: Rollout) -> None:
    manager = make(one, two)
    for rollout, server in zip((one, two), manager.servers, strict=True):
        await asyncio.to_thread(rollout.die)
        server.mark_down("unplugged")
        server.down_since -= 2 * server.config.timeout  # long ago
    with pytest.raises(NoServerAvailable, match=f"{one.address}.* is down: .+{two.address}.* is down: .+"):
        await say(manager)


async def test_a_busy_server_is_given_less_at_once(make: Make, one: Rollout) -> None:
    one.script.extend([answers(429, {"error": {"message": "later"}}), Say("now")])
    manager = make(one, num_max_requests_at_once=64)
    assert await say(manager) == [*one.vocabulary.encode("now"), one.end]
    (server,) = manager.servers
    assert (server.sem.allowed, server.server_healthy) == (32, True)
    assert server.attempts_list == [2]


async def test_no_more_calls_are_in_flight_than_there_are_places(make: Make, one: Rollout) -> None:
    gate = one.gate()
    one.reply = lambda asked: Say(at=gate)
    manager = make(one, num_max_requests_at_once=2, num_requests_for_eval=1)
    calls = [asyncio.create_task(say(manager)) for _ in range(5)]
    await asyncio.to_thread(one.until, lambda: len(one.orders) == 2)
    (server,) = manager.servers
    assert (server.sem.in_flight, server.sem.free) == (2, 0)
    calls[3].cancel()
    evaluation = asyncio.create_task(say(manager, split="eval"))
    await asyncio.to_thread(one.until, lambda: len(one.orders) == 3)
    gate.open()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in done] == [False, False, False, True, False]
    await evaluation
    assert (server.sem.in_flight, server.eval_sem.in_flight) == (0, 0)


async def test_a_smaller_weight_of_the_environment_leaves_it_fewer_places(make: Make, one: Rollout) -> None:
    manager = make(one, num_max_requests_at_once=100)
    await manager.update_weight(0.25)
    assert manager.servers[0].sem.allowed == 25


async def test_a_call_that_is_refused_is_not_made_again(make: Make, one: Rollout, two: Rollout) -> None:
    one.reply = two.reply = lambda asked: answers(400, {"error": {"message": "no such thing"}})
    with pytest.raises(RequestRefused, match="no such thing"):
        await say(make(one, two))
    assert len(one.orders) + len(two.orders) == 1


async def test_what_fails_everywhere_is_raised_after_so_many_attempts(make: Make, one: Rollout, two: Rollout) -> None:
    one.reply = two.reply = lambda asked: answers(500, {"error": {"message": "broken"}})
    with pytest.raises(Unavailable, match="broken"):
        await say(make(one, two, max_attempts=4))
    assert len(one.orders) + len(two.orders) == 4


@pytest.mark.parametrize(
    "wrong",
    [Say(ids=[40, 41], log_probs=[-0.5]), Say(ids=[40], log_probs=[None, None]), Say(prompt=[9, 9, 9])],
    ids=["too few log-probs", "empty log-probs", "another prompt"],
)
async def test_tokens_that_do_not_add_up_are_never_handed_on(make: Make, one: Rollout, wrong: Say) -> None:
    one.script.extend([wrong, Say("right")])
    assert await say(make(one)) == [*one.vocabulary.encode("right"), one.end]


async def test_a_server_that_ignores_n_is_asked_n_times(make: Make, one: Rollout) -> None:
    one.script.append(Say(("first",)))
    one.reply = lambda asked: Say(("more",))
    manager = make(one)
    for first in ("first", "more"):
        _, ids, _, _ = await manager.tokens_and_logprobs_completion(input_ids=[5], n=3, max_tokens=9)
        said = [one.vocabulary.decode(answer[:-1]) for answer in ids]
        assert said == [first, "more", "more"]
    assert [order.get("n") for order in one.orders] == [3, *[None] * 5]


async def test_tools_are_called_in_openai_s_words_and_answered(make: Make, one: Rollout) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    one.script.extend([Say(f"Let me see.\n{call}"), Say("It is 3.")])
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    messages: list[Any] = [user("1 + 2?")]
    async with make(one).managed_server() as managed:
        asked = (await managed.chat_completion(messages=messages, tools=tools, max_tokens=99)).choices[0]
        assert (asked.finish_reason, asked.message.content) == ("tool_calls", "Let me see.")
        assert asked.message.tool_calls is not None
        (made,) = asked.message.tool_calls
        assert (made.function.name, made["function"]["arguments"]) == ("add", '{"a": 1}')
        messages += [asked.message, {"role": "tool", "tool_call_id": made.id, "content": "3"}]
        await managed.chat_completion(messages=messages, tools=tools, max_tokens=99)
        (node,) = managed.get_state()["nodes"]
    first, second = one.orders
    assert second["prompt"][: len(first["prompt"])] == first["prompt"]
    assert one.vocabulary.decode(second["prompt"]).count(call) == 1
    assert node.tokens[: len(second["prompt"])] == second["prompt"]


async def test_what_openai_s_client_takes_beside_the_body_reaches_the_server(make: Make, one: Rollout) -> None:
    options = {"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}}
    async with make(one).managed_server() as managed:
        await managed.chat_completion(messages=[user("a")], max_tokens=9, extra_body=options, stop=None)
    (order,) = one.orders
    assert (order["top_k"], order["max_tokens"]) == (5, 9)
    assert not {"extra_body", "chat_template_kwargs", "messages", "stop"} & set(order)


async def test_an_unknown_split_or_server_is_refused_by_name(make: Make, one: Rollout) -> None:
    manager = make(one)
    with pytest.raises(InvalidInput, match="split is 'test'"):
        await say(manager, split="test")
    with pytest.raises(InvalidInput, match="http://elsewhere"):
        async with manager.managed_server(base_url="http://elsewhere"):
            pass
