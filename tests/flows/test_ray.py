"""Rollouts that are played by workers on Ray: complete, each once, whoever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.engine.kit import Client
from tests.flows.rollouts import rows
from tests.gateway.kit import running_gateway, until

from headrace import DataPool
from headrace.data.errors import HeadraceError, InvalidInput
from headrace.files import checked
from headrace.flows.flow import AgentFailed
from headrace.flows.gateway_client import GatewayRefused, TrajectoryEnded
from headrace.flows.ray import RayFlow, RolloutOutcome
from headrace.flows.rollout_config import RolloutConfig
from headrace.flows.rollout_state import RolloutStateFile
from headrace.flows.rollouter import AsyncRollouter, RolloutSummary
from headrace.flows.schedule import RolloutSchedule
from headrace.net.http_answer import NoAnswer

pytestmark = pytest.mark.ray

PATIENCE_S = 600
#: Says who plays it, waits while it is told to, and asks once.
AGENT = """
import asyncio, os
from pathlib import Path
import aiohttp

HERE = Path(__file__).parent

async def solve(task, base_url):
    with (HERE / "played").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    while (HERE / "hold").exists():
        await asyncio.sleep(0.02)
    body = {"model": "policy", "messages": [{"role": "user", "content": task["question"]}], "max_tokens": 2}
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        async with session.post(f"{base_url}/v1/chat/completions", json=body) as answer:
            await answer.json()
"""

#: Asks once, with nothing but what the environment says.
COMMAND = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
body = {"model": "policy", "messages": [{"role": "user", "content": task["question"]}], "max_tokens": 2}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
asked.add_header("Content-Type", "application/json")
urllib.request.urlopen(asked).read()
"""
#: A flow of one turn, which scores what it played.
FLOW = """
from headrace.flows.turns import SingleTurnFlow

class Scored(SingleTurnFlow):
    async def play(self, task, handle):
        await super().play(task, handle)
        return float(task.row["ground_truth"])
"""


def configured(address: str, cluster: str, agent: dict[str, Any] | None = None, **placement: object) -> RolloutConfig:
    values = {
        "data": {"train": "unused.jsonl", "n_rollouts": 2},
        "agent": agent or {"run": "agent.py:solve"},
        "gateway": {"address": address},
        "rollout": {"batch_size": 4, "max_staleness": 9, "retries": 0, "poll_s": 0.05},
        "workers": {"ray": cluster, "count": 2, "placement": {"num_cpus": 0, **placement}},
    }
    return checked(RolloutConfig, values, "rollout.yaml")


async def played(config: RolloutConfig, base: Path) -> RolloutSummary:
    address = config.gateway.address or ""
    flow = await asyncio.to_thread(RayFlow.begun, config, address, base)
    client = config.gateway.client(address)
    try:
        with RolloutStateFile(None) as file:
            rules = config.rules(4, 0)
            schedule = RolloutSchedule(rules, file.load(rules.rows))
            return await AsyncRollouter(schedule, flow, {"train": rows(4)}, client, file, poll_s=0.05).run()
    finally:
        await flow.aclose()
        await client.aclose()


def test_what_a_worker_played_that_died_is_played_again_and_not_charged(
    ray_cluster: str, pool: DataPool, engine: Client, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "hold").touch()
    (tmp_path / "played").touch()
    found: list[RolloutSummary] = []
    with running_gateway(pool, f"http://{engine.host}", folder) as gateway:
        config = configured(gateway.address, ray_cluster)
        playing = threading.Thread(target=lambda: found.append(asyncio.run(played(config, tmp_path))), daemon=True)
        playing.start()
        until(lambda: len((tmp_path / "played").read_text().split()) == 8)
        workers = (tmp_path / "played").read_text().split()
        assert len(set(workers)) == 2, "both play, the same number each"
        os.kill(int(workers[0]), signal.SIGKILL)
        (tmp_path / "hold").unlink()
        playing.join(PATIENCE_S)
    (summary,) = found
    assert (summary.finished, summary.accepted, summary.lost, summary.rollouts) == (True, 4, 0, 8)
    assert summary.failed.keys() == {"worker_lost"}
    items = pool.list_trajectories("train", limit=100)["items"]
    assert sum(row["complete"] for row in items) == 8
    assert pool.stats()["balanced"]


@pytest.mark.parametrize("kind", ["command", "flow"])
def test_workers_play_every_row_with_each_kind_of_agent(
    ray_cluster: str, pool: DataPool, engine: Client, folder: Path, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "agent.py").write_text(COMMAND)
    (tmp_path / "flow.py").write_text(FLOW)
    agents: dict[str, dict[str, Any]] = {
        "command": {"command": [sys.executable, "agent.py"]},
        "flow": {"flow": {"name": "scored", "_target_": "flow.py:Scored"}, "sampling": {"max_tokens": 2}},
    }
    with running_gateway(pool, f"http://{engine.host}", folder) as gateway:
        summary = asyncio.run(played(configured(gateway.address, ray_cluster, agents[kind]), tmp_path))
    assert (summary.finished, summary.accepted, summary.rollouts, summary.failed) == (True, 4, 8, {})
    items = pool.list_trajectories("train", limit=100)["items"]
    assert [row["complete"] for row in items] == [True] * 8
    if kind == "flow":
        assert sorted(row["reward"] for row in items) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert pool.stats()["balanced"]


def test_an_agent_that_a_worker_cannot_import_and_a_node_that_is_not_there_are_told(
    ray_cluster: str, tmp_path: Path
) -> None:
    agent = {"run": "missing.py:solve"}
    with pytest.raises(HeadraceError, match=r"a rollout worker did not begin: .*missing\.py"):
        RayFlow.begun(configured("http://127.0.0.1:9", ray_cluster, agent), "http://127.0.0.1:9", tmp_path)
    with pytest.raises(InvalidInput, match=r"the cluster has no node '10\.9\.9\.9'; its nodes are"):
        RayFlow.begun(configured("http://127.0.0.1:9", ray_cluster, node="10.9.9.9"), "http://127.0.0.1:9", tmp_path)


def test_an_outcome_raises_what_was_raised() -> None:
    RolloutOutcome("complete").settle()
    for error in (
        AgentFailed("hung", "it did not end", "last words"),
        TrajectoryEnded("it is complete", 409, "ended"),
        GatewayRefused("no", 401, "key"),
        NoAnswer("away"),
    ):
        with pytest.raises(type(error)) as raised:
            RolloutOutcome.of(error).settle()
        assert type(raised.value) is type(error)
        assert str(raised.value) == str(error)
        assert vars(raised.value) == vars(error)
    with pytest.raises(AgentFailed, match="crashed: KeyError: 'x'"):
        RolloutOutcome.of(KeyError("x")).settle()
