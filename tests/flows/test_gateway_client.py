"""The gateway as flows reach it: what is asked again, what is not, and with which key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.engine.kit import Client
from tests.gateway.kit import Running, running_gateway, serving

from headrace import DataPool
from headrace.flows import GatewayClient, Task
from headrace.flows.gateway_client import Ending, GatewayRefused, TrajectoryEnded
from headrace.gateway import Settings, create_app
from headrace.net.http_answer import BadAddress, NoAnswer


async def test_a_trajectory_begins_and_ends_once(client: GatewayClient, gateway: Running, task: Task) -> None:
    handle = await client.init_trajectory(task)
    assert await client.init_trajectory(task) == handle
    await client.register(handle, {"more": 1})
    assert await client.complete(handle, min_steps=1) == Ending("too_few", 0)
    assert gateway.pool.trajectory(task.trajectory_uid).complete is False
    sampled = await client.generate(messages=task.messages, sampling={"max_tokens": 2}, handle=handle)
    step = {
        "trajectory_uid": handle.trajectory_uid,
        "prompt_uid": handle.prompt_uid,
        "step_index": 0,
        "prompt_ids": sampled.prompt_ids,
        "response_ids": sampled.response_ids,
        "rollout_log_probs": sampled.log_probs,
    }
    assert await client.submit_steps([step]) == {"accepted": 1}
    assert await client.submit_steps([step]) == {"accepted": 0, "duplicates": 1}
    assert await client.complete(handle, 0.5, min_steps=1) == Ending("ok", 1)
    found = gateway.pool.trajectory(task.trajectory_uid)
    assert (found.complete, found.reward, found.metadata) == (True, 0.5, {**task.row, "more": 1})
    with pytest.raises(TrajectoryEnded):
        await client.init_trajectory(task)


async def test_a_failed_trajectory_stays_failed(client: GatewayClient, task: Task) -> None:
    handle = await client.init_trajectory(task)
    assert await client.fail(handle, "crashed: " + "x" * 5_000) == Ending("ok", 0)
    assert (await client.fail(handle, "again")).status == "ok"
    with pytest.raises(TrajectoryEnded):
        await client.init_trajectory(task)
    again = await client.init_trajectory(replace(task, attempt=1))
    assert again.prompt_uid == handle.prompt_uid
    found = await client.states(task.channel, [again.trajectory_uid, handle.trajectory_uid, "nobody"])
    assert {uid: row["state"] for uid, row in found.rows.items()} == {
        again.trajectory_uid: "queued",
        handle.trajectory_uid: "failed",
        "nobody": "unknown",
    }
    assert found.rows[again.trajectory_uid]["complete"] is False
    assert found.ready_groups == 0


async def test_a_gateway_that_is_away_is_asked_until_it_is_back(folder: Path, engine: Client, task: Task) -> None:
    settings = Settings(vllm_addresses=f"http://{engine.host}", tokenizer_path=str(folder))
    with DataPool() as pool:
        with running_gateway(pool, f"http://{engine.host}", folder) as gateway:
            address = gateway.address
        client = GatewayClient(address, patience_s=300)
        assert await client.ready() is False
        asked = asyncio.ensure_future(client.init_trajectory(task))
        await asyncio.sleep(0)  # it is on its way
        with serving(create_app(pool, settings, drain_s=5), port=int(address.rpartition(":")[2])):
            assert (await asked).trajectory_uid == task.trajectory_uid
        await client.aclose()


async def test_patience_has_an_end(task: Task, unused_tcp_port: int) -> None:
    client = GatewayClient(f"http://127.0.0.1:{unused_tcp_port}", patience_s=0)
    with pytest.raises(NoAnswer, match="cannot be reached"):
        await client.init_trajectory(task)
    await client.aclose()


async def test_the_version_is_the_newest(client: GatewayClient) -> None:
    assert (await client.ready(), await client.policy_version()) == (True, 0)


async def test_what_is_refused_is_not_asked_again(client: GatewayClient, task: Task) -> None:
    with pytest.raises(GatewayRefused, match="trajectory_uid") as caught:
        await client.init_trajectory(replace(task, prompt_uid="x" * 5_000))
    assert caught.value.status == 400


async def test_an_agents_key_does_not_end_a_trajectory(folder: Path, engine: Client, task: Task) -> None:
    with (
        DataPool() as pool,
        running_gateway(pool, f"http://{engine.host}", folder, api_key="calls", reward_key="pays") as gateway,
    ):
        agents, ours = GatewayClient(gateway.address, "calls"), GatewayClient(gateway.address, "calls", "pays")
        handle = await ours.init_trajectory(task)
        for refused in (agents.complete(handle), agents.fail(handle, "mine")):
            with pytest.raises(GatewayRefused, match="reward key") as caught:
                await refused
            assert caught.value.status == 401
        assert (await ours.complete(handle)).status == "ok"
        await agents.aclose()
        await ours.aclose()


def test_an_address_that_is_none_is_said_at_once() -> None:
    with pytest.raises(BadAddress, match="127"):
        GatewayClient("127.0.0.1:8100")
