"""Through a real gateway: what an environment scores and what the gateway recorded are the same, uids and tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.kit import Client, hold_until_resumed
from tests.envs.api import Api
from tests.envs.kit import CountingEnv, config, running
from tests.gateway.kit import Evidence, Running, running_gateway, told, until
from tests.gateway.rollout import Say, in_front, scripted, user

from headrace import DataPool, Step
from headrace.envs.server import APIServerConfig, SequenceNode, ServerManager, new_group

MASKED = -100


@pytest.fixture
def gateway(engine: Client, folder: Path) -> Iterator[Running]:
    with DataPool() as pool, running_gateway(pool, f"http://{engine.host}", folder) as found:
        yield found


@pytest.fixture
def evidence(engine: Client, gateway: Running) -> Evidence:
    """What the engine does once the gateway has probed it."""
    return Evidence(engine)


@pytest.fixture
async def server(gateway: Running) -> AsyncIterator[ServerManager]:
    """Without a tokenizer: the gateway has it."""
    manager = ServerManager([APIServerConfig(base_url=f"{gateway.address}/v1", server_type="gateway")])
    yield manager
    await manager.close()


async def play(server: ServerManager, name: str, turns: int = 3) -> SequenceNode:
    messages: list[Any] = [user(name)]
    async with server.managed_server() as managed:
        for _ in range(turns):
            answer = await managed.chat_completion(messages=messages, max_tokens=6)
            messages += [answer.choices[0].message, user("on")]
        (node,) = managed.get_state()["nodes"]
    found: SequenceNode = node
    return found


def scored(nodes: list[SequenceNode]) -> dict[str, Any]:
    """A group as environments make it: nothing in it says where it came from."""
    return {
        "tokens": [list(node.tokens) for node in nodes],
        "masks": [node.masked_tokens for node in nodes],
        "scores": [float(at) for at in range(len(nodes))],
    }


def same(node_tokens: list[int], masks: list[int], steps: list[Step]) -> None:
    """A sequence is the steps of a trajectory, one after the other."""
    last = steps[-1]
    assert node_tokens == [*last.prompt_ids.tolist(), *last.response_ids.tolist()]
    sampled = [token for step in steps for token in step.response_ids.tolist()]
    assert [token for token in masks if token != MASKED] == sampled


async def test_steps_and_the_scored_group_carry_the_same_uids(
    server: ServerManager, gateway: Running, evidence: Evidence
) -> None:
    with new_group() as prompt_uid:
        nodes = await asyncio.gather(*(play(server, "the same question") for _ in range(3)))
    group = server.with_uids(scored(nodes))
    assert group["group_overrides"] == {"prompt_uid": prompt_uid}
    assert len({named["trajectory_uid"] for named in group["overrides"]}) == 3
    everything = []
    for at, named in enumerate(group["overrides"]):
        found = gateway.pool.trajectory(named["trajectory_uid"])
        assert (found.prompt_uid, named["prompt_uid"]) == (prompt_uid, prompt_uid)
        assert (found.channel, found.complete, len(found.steps)) == ("envs", True, 3)
        same(group["tokens"][at], group["masks"][at], list(found.steps))
        log_probs = [value for value in nodes[at].logprobs if value != 1.0]
        recorded = [value for step in found.steps for value in step.rollout_log_probs.tolist()]
        assert log_probs == pytest.approx(recorded, abs=1e-6)
        everything += found.steps
    evidence.holds(everything)


async def test_answers_of_one_call_are_rollouts_of_one_group(
    server: ServerManager, gateway: Running, evidence: Evidence
) -> None:
    """In a session, and by a plain call."""
    async with server.managed_server() as managed:
        await managed.chat_completion(messages=[user("a")], n=3, max_tokens=5)
        nodes = managed.get_state()["nodes"]
    managed_group = server.with_uids(scored(nodes))
    with new_group() as prompt_uid:
        prompt, ids, _, _ = await server.tokens_and_logprobs_completion(input_ids=[5, 6], n=2, max_tokens=5)
    plain_group = server.with_uids({"tokens": [prompt + one for one in ids], "scores": [0.0, 1.0]})
    assert plain_group["group_overrides"] == {"prompt_uid": prompt_uid}
    steps = []
    for group, size in ((managed_group, 3), (plain_group, 2)):
        uids = [named["trajectory_uid"] for named in group["overrides"]]
        assert len(set(uids)) == size
        for uid, tokens in zip(uids, group["tokens"], strict=True):
            (step,) = gateway.steps(uid)
            assert tokens == [*step.prompt_ids.tolist(), *step.response_ids.tolist()]
            assert step.prompt_uid == group["group_overrides"]["prompt_uid"]
            steps.append(step)
    evidence.holds(steps)


async def test_an_answer_that_goes_on_stays_in_its_trajectory(server: ServerManager, gateway: Running) -> None:
    async with server.managed_server(prompt_uid="p", trajectory_uid="mine") as managed:
        first = await managed.chat_completion(messages=[user("a")], max_tokens=5)
        await managed.chat_completion(messages=[user("b")], max_tokens=5)
        history = [user("a"), first.choices[0].message, user("c")]
        await managed.chat_completion(messages=history, max_tokens=5)
        nodes = managed.get_state()["nodes"]
    longest = max(nodes, key=lambda node: len(node.tokens))
    assert longest.metadata is not None
    assert (longest.metadata["trajectory_uid"], longest.metadata["prompt_uid"]) == ("mine", "p")
    same(longest.tokens, longest.masked_tokens, gateway.steps("mine"))
    (other,) = [node for node in nodes if node is not longest]
    assert other.metadata is not None
    assert len(gateway.steps(other.metadata["trajectory_uid"])) == 1


async def test_text_goes_on_from_its_ids_where_a_tokenizer_is_at_hand(
    gateway: Running, tokenizer: Any, evidence: Evidence
) -> None:
    config = APIServerConfig(base_url=gateway.address, server_type="gateway")
    manager = ServerManager([config], tokenizer=tokenizer)
    async with manager.managed_server(trajectory_uid="text") as managed:
        said = (await managed.completion(prompt="Once", max_tokens=5)).choices[0].text
        await managed.completion(prompt=f"Once{said} more", max_tokens=5)
        (node,) = managed.get_state()["nodes"]
    await manager.close()
    steps = gateway.steps("text")
    same(node.tokens, node.masked_tokens, steps)
    evidence.holds(steps)


class Asking(CountingEnv):
    """Every rollout is a conversation of two turns."""

    async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
        node = await play(self.server, f"item {item}", turns=2)
        number = self.made[item] = self.made.get(item, 0) + 1
        return {"tokens": node.tokens, "masks": node.masked_tokens, "scores": float(number)}, []


async def test_an_environment_at_work_sends_groups_under_the_uids_of_their_steps(
    server: ServerManager, gateway: Running, api: Api, tokenizer: Any
) -> None:
    env = Asking(config(api, group_size=2), most=2)
    env.server, env.tokenizer = server, tokenizer
    async with running(env):
        await api.until(lambda: len(api.received) == 2)
    prompts = set()
    for group in api.received:
        prompt_uid = group["group_overrides"]["prompt_uid"]
        prompts.add(prompt_uid)
        for at, named in enumerate(group["overrides"]):
            found = gateway.pool.trajectory(named["trajectory_uid"])
            assert (found.prompt_uid, found.complete) == (prompt_uid, True)
            same(group["tokens"][at], group["masks"][at], list(found.steps))
    assert len(prompts) == 2


@pytest.fixture
def thinker(folder: Path, tmp_path: Path) -> Path:
    """The tiny model with a template that knows reasoning."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.chat_template += "{#- <think></think> -#}"
    tokenizer.save_pretrained(str(tmp_path))
    return tmp_path


async def test_reasoning_stays_in_what_an_environment_reads(thinker: Path) -> None:
    """A gateway takes it out of the content, where environments look for it."""
    with scripted(thinker) as rollout, in_front(rollout, thinker) as gateway:
        rollout.reply = lambda asked: Say("<think>\nhm\n</think>\n\nyes")
        manager = ServerManager([APIServerConfig(base_url=gateway.address, server_type="gateway")])
        messages: list[Any] = [user("a")]
        async with manager.managed_server(trajectory_uid="thought") as managed:
            answer = (await managed.chat_completion(messages=messages, max_tokens=64)).choices[0].message
            messages += [{"role": "assistant", "content": answer.content}, user("b")]
            await managed.chat_completion(messages=messages, max_tokens=64)
            (node,) = managed.get_state()["nodes"]
        await manager.close()
        assert (answer.content, answer["reasoning_content"]) == ("<think>\nhm\n</think>\n\nyes", "hm")
        same(node.tokens, node.masked_tokens, gateway.steps("thought"))


def test_a_group_that_no_gateway_recorded_is_left_as_it_is() -> None:
    manager = ServerManager([APIServerConfig(base_url="http://127.0.0.1:1", server_type="gateway")])
    group = {"tokens": [[1, 2]], "scores": [1.0], "overrides": [{"kept": 1}]}
    assert manager.with_uids(group) == group


# -- calls that are not recorded ---------------------------------------------------------------------------------------


@pytest.fixture
async def unrecorded(gateway: Running, tokenizer: Any) -> AsyncIterator[ServerManager]:
    """As in `headrace run`: the scored group is all that is kept."""
    config = APIServerConfig(base_url=f"{gateway.address}/v1", server_type="gateway", record=False)
    manager = ServerManager([config], tokenizer=tokenizer)
    yield manager
    await manager.close()


def submitted(gateway: Running) -> int:
    """Steps that the pool was ever given."""
    return sum(found["ledger"]["submitted"] for found in gateway.pool.stats()["channels"].values())


def joined(calls: list[dict[str, Any]], name: str) -> list[Any]:
    """What the engine says of several calls, one after the other."""
    return [value for call in calls for value in call[name]]


def sampled(evidence: Evidence, node: SequenceNode) -> None:
    """A sequence's tokens and log-probs are those that the engine consumed and sampled, bit for bit."""
    calls = evidence.calls()
    assert node.tokens == [*calls[-1]["prompt_token_ids"], *calls[-1]["token_ids"]]
    assert [token for token in node.masked_tokens if token != MASKED] == joined(calls, "token_ids")
    log_probs = [value for value, token in zip(node.logprobs, node.masked_tokens, strict=True) if token != MASKED]
    assert log_probs == pytest.approx(joined(calls, "logprobs"), abs=1e-6)


async def test_without_recording_tokens_are_exact_and_the_pool_keeps_nothing(
    unrecorded: ServerManager, gateway: Running, evidence: Evidence
) -> None:
    node = await play(unrecorded, "what is it?")
    sampled(evidence, node)
    assert len(evidence.calls()) == 3
    assert submitted(gateway) == 0
    group = scored([node])
    assert unrecorded.with_uids(group) == group


async def test_without_recording_every_kind_of_call_is_answered(unrecorded: ServerManager, gateway: Running) -> None:
    chat = await unrecorded.chat_completion(messages=[user("hi")], n=2, max_tokens=4)
    text = await unrecorded.completion(prompt="hi", max_tokens=4)
    prompt, ids, log_probs, _ = await unrecorded.tokens_and_logprobs_completion(prompt="hi", n=3, max_tokens=4)
    assert (len(chat.choices), len(text.choices), len(ids)) == (2, 1, 3)
    assert prompt
    assert [len(one) for one in log_probs] == [len(one) for one in ids]
    assert submitted(gateway) == 0


async def test_a_trajectory_that_is_gone_is_begun_anew(unrecorded: ServerManager, gateway: Running) -> None:
    await unrecorded.completion(prompt="hi", max_tokens=2)
    (held,) = gateway.get("/trajectories", params={"channel": "envs"}).json()["items"]
    gateway.http.delete(f"/trajectories/{held['trajectory_uid']}")
    assert (await unrecorded.completion(prompt="hi", max_tokens=2)).choices


@pytest.mark.parametrize("mode", ["keep", "abort-resume"])
async def test_a_publish_holds_its_calls_and_what_it_gets_is_what_was_sampled(
    unrecorded: ServerManager, gateway: Running, engine: Client, evidence: Evidence, mode: str
) -> None:
    """As a trainer does it: calls in flight are frozen, or cut and continued; new ones wait for the end."""
    asked = {"max_tokens": 1000, "ignore_eos": True}
    await asyncio.to_thread(hold_until_resumed, engine, steps=8)
    first = asyncio.create_task(unrecorded.tokens_and_logprobs_completion(prompt="in flight", **asked))
    await asyncio.to_thread(until, lambda: _sampling(engine))
    await asyncio.to_thread(lambda: told(gateway.post(f"/pause?mode={mode}")))
    second = asyncio.create_task(unrecorded.tokens_and_logprobs_completion(prompt="held", max_tokens=4))
    await asyncio.to_thread(until, lambda: gateway.counted("held") == (1 if mode == "keep" else 2))
    assert not first.done()
    assert not second.done()
    await asyncio.to_thread(lambda: told(gateway.post("/resume")))
    (_, (long,), (log_probs,), _), (prompt, (short,), _, _) = await asyncio.gather(first, second)
    calls = evidence.calls()
    (held,) = [call for call in calls if call["prompt_token_ids"] == prompt]
    assert held["token_ids"] == short
    parts = [call for call in calls if call is not held]
    assert len(parts) == (1 if mode == "keep" else 2)
    assert joined(parts, "token_ids") == long
    assert joined(parts, "logprobs") == pytest.approx(log_probs, abs=1e-6)
    assert len(long) == 1000
    assert submitted(gateway) == 0


def _sampling(engine: Client) -> bool:
    """Whether a call has begun to be answered."""
    return any(sequence.output for call in list(engine.engine.open) for sequence in call.sequences)
