"""A gateway whose pool is a Ray actor: a plain process that joins the cluster by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.engine.kit import Client
from tests.gateway.kit import Evidence, await_ready, told

from headrace import connect
from headrace.pool.ray import actor_address, start_pool, stop_pool

pytestmark = pytest.mark.ray

PATIENCE_S = 120


def test_the_seeds_command_line_records_into_a_named_actor(ray_cluster: str, engine: Client, folder: Path) -> None:
    name = "gateway_pool"
    start_pool(name, address=ray_cluster)
    flags = {
        "data-pool-name": name,
        "vllm-addresses": f"http://{engine.host}",
        "tokenizer-path": str(folder),
        "prompt-length": "1024",
        "response-length": "8",
        "ray-address": ray_cluster,
        "ray-namespace": "default",
        "host": "127.0.0.1",
        "port": "0",
    }
    command = [sys.executable, "-m", "headrace.gateway", *(part for k, v in flags.items() for part in (f"--{k}", v))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("gateway listening on "), said
        address = said.split()[-1]
        await_ready(address)
        evidence = Evidence(engine)
        with httpx.Client(timeout=PATIENCE_S, trust_env=False) as http:
            begun = told(http.post(f"{address}/init_trajectory", json={"prompt_uid": "p", "channel": "val"}))
            messages: list[dict[str, str]] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"turn {turn}"})
                body = {"messages": messages, "seed": turn}
                answer = told(http.post(f"{begun['base_url']}/chat/completions", json=body))
                messages.append(answer["choices"][0]["message"])
            ended = told(http.post(f"{begun['base_url']}/complete_trajectory", json={"reward": 0.5}))
        assert ended == {"status": "ok", "steps": 3}
        pool = connect(actor_address(name, ray_cluster))
        batch = pool.fetch_batch(1, channel="val", timeout=0)
        assert batch is not None
        evidence.holds(batch.steps)
        assert [step.reward for step in batch.steps] == [None, None, 0.5]
        assert max(len(step.response_ids) for step in batch.steps) <= 8
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert process.stdout is not None
        process.stdout.close()
        stop_pool(name, address=ray_cluster)


def test_a_pool_that_is_not_there_is_said_at_once(ray_cluster: str, folder: Path) -> None:
    flags = ["--data-pool-name", "nobody", "--ray-address", ray_cluster, "--vllm-addresses", "http://127.0.0.1:1"]
    flags += ["--tokenizer-path", str(folder), "--prompt-length", "8", "--response-length", "8", "--port", "0"]
    ended = subprocess.run(
        [sys.executable, "-m", "headrace.gateway", "--host", "127.0.0.1", *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 1
    assert "nobody" in ended.stderr
    assert "Traceback" not in ended.stderr
