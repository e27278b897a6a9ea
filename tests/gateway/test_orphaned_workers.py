"""Workers whose parent was killed, and the pool with it: none stays behind with a step that nobody can keep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from tests.gateway.kit import await_ready, told, workers_of
from tests.gateway.rollout import PATIENCE_S, Rollout, Say, user


def test_a_call_under_way_does_not_keep_a_worker_whose_pool_is_gone(
    rollout: Rollout, folder: Path, tmp_path: Path
) -> None:
    gate = rollout.gate()
    rollout.script.append(Say("too late", at=gate))
    command = [sys.executable, "-m", "headrace.gateway", "--host", "127.0.0.1", "--port", "0", "--workers", "2"]
    command += ["--vllm-addresses", rollout.address, "--tokenizer-path", str(folder), "--renderer", "template"]
    command += ["--journal", str(tmp_path / "journal")]
    gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    workers: list[psutil.Process] = []
    try:
        assert gateway.stdout is not None
        address = gateway.stdout.readline().split()[-1]
        await_ready(address)
        workers = workers_of(gateway)
        with httpx.Client(timeout=PATIENCE_S, trust_env=False) as client, ThreadPoolExecutor(1) as threads:
            base = told(client.post(f"{address}/init_trajectory"))["base_url"]
            body = {"messages": [user("hi")]}
            asked = threads.submit(client.post, f"{base}/v1/chat/completions", json=body)
            gate.reached()
            os.kill(gateway.pid, signal.SIGKILL)
            gateway.wait(PATIENCE_S)
            gate.open()
            with pytest.raises(httpx.TransportError):
                asked.result(PATIENCE_S)
        assert psutil.wait_procs(workers, PATIENCE_S)[1] == []
    finally:
        for process in (*workers, psutil.Process(gateway.pid) if gateway.poll() is None else None):
            if process is not None and process.is_running():
                process.kill()
        gateway.wait(PATIENCE_S)
        if gateway.stdout is not None:
            gateway.stdout.close()
