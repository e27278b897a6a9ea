"""Starting: HTTP at once, the tokenizer behind it, and a configuration that could not work refused by its field."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.gateway.kit import await_ready, running_gateway, told, until
from tests.gateway.rollout import PATIENCE_S, Rollout, chat, error_of, in_front, scripted

from headrace import DataPool
from headrace.cli.gateway import GatewayCommand
from headrace.gateway import Settings, served_model
from headrace.net.server import usual_host
from headrace.tokens import load_renderer


def slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Tokenizers load when they are told to: set once one is asked for, and what lets it load."""
    loading, go_on = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        loading.set()
        assert go_on.wait(120)
        return load_renderer(*given)

    monkeypatch.setattr(served_model, "load_renderer", slow)
    return loading, go_on


def test_it_serves_at_once_and_takes_calls_once_the_tokenizer_is_loaded(
    rollout: Rollout, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, go_on = slowly(monkeypatch)
    with in_front(rollout, folder, until_ready=False) as running:
        try:
            assert loading.wait(120)
            assert told(running.get("/health")) == {"status": "ok"}
            ready = running.get("/ready")
            assert ready.status_code == 503
            assert ready.json() == {"detail": "Gateway not ready (tokenizer still loading)"}
            made = running.init()
            base = made["base_url"]
            calls = [
                chat(running, base, "hi"),
                chat(running, base, "hi", stream=True),
                running.post(f"{base}/v1/completions", {"prompt": "x"}),
            ]
            for refused in calls:
                assert error_of(refused, 503)["message"] == "Gateway not ready (tokenizer still loading)"
                assert int(refused.headers["retry-after"]) >= 1
            plain = running.post("/generate", {"prompt_ids": [5]})
            assert (plain.status_code, "retry-after" in plain.headers) == (503, True)
            body = {"steps": [{"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "white"}]}
            assert told(running.post("/submit_steps", body)) == {"accepted": 1}
        finally:
            go_on.set()
        await_ready(running.address)
        assert told(running.get("/ready")) == {"status": "ready"}
        told(chat(running, base, "hi"))
        assert len(running.steps(made["trajectory_uid"])) == 1


def test_versions_that_were_told_before_the_tokenizer_was_loaded_are_kept(
    rollout: Rollout, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted(folder) as other, DataPool() as pool:
        pool.set_version(3)
        loading, go_on = slowly(monkeypatch)
        with running_gateway(pool, [rollout.address, other.address], folder, until_ready=False) as running:
            try:
                assert loading.wait(120)
                for address, version in ((rollout.address, 7), (other.address, 8)):
                    told(running.post("/policy_version", {"version": version, "server": address}))
            finally:
                go_on.set()
            await_ready(running.address)
            shown = told(running.get("/policy_version"))
    assert shown == {"version": 8, "servers": {rollout.address: 7, other.address: 8}}


def test_a_server_that_comes_later_is_found(rollout: Rollout, folder: Path) -> None:
    waiting = f"Gateway not ready (waiting for rollout server {rollout.address}: connection refused)"
    rollout.die()
    try:
        with in_front(rollout, folder, until_ready=False) as running:
            base = running.init()["base_url"]
            until(lambda: running.get("/ready").json() == {"detail": waiting})
            refused = chat(running, base, "hi")
            assert error_of(refused, 503)["code"] == "no_server"
            rollout.revive()
            await_ready(running.address)
            told(chat(running, base, "hi"))
            rollout.die()
            assert error_of(chat(running, base, "more"), 503)["code"] == "no_server"
            assert running.get("/ready").status_code == 200  # a trainer that brings it back must not wait for it
    finally:
        rollout.die()
        rollout.revive()


def test_without_another_word_the_contracts_defaults_hold() -> None:
    found = GatewayCommand(vllm_addresses="http://127.0.0.1:1", tokenizer_path="x")
    assert (found.port, found.ray_address, found.ray_namespace) == (8100, "auto", "default")
    assert (usual_host(keyed=found.settings().keyed), usual_host(keyed=True)) == ("127.0.0.1", "0.0.0.0")
    assert found.settings().balance == "round-robin"
    assert found.settings().history == "bridge"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"vllm_addresses": ""}, "at least one"),
        ({"vllm_addresses": " , "}, "at least one"),
        ({"vllm_addresses": "host:8001"}, "host:8001"),
        ({"vllm_addresses": "http://a:1,http://a:1/"}, "twice"),
        ({"tokenizer_path": ""}, "tokenizer_path"),
        ({"tokenizer_path": " "}, "it is empty"),
        ({"prompt_length": 0}, "prompt_length"),
        ({"response_length": -1}, "response_length"),
        ({"balance": "random"}, "balance"),
        ({"history": "both"}, "history"),
        ({"wire": "grpc"}, "wire"),
        ({"ack": "never"}, "ack"),
        ({"idle_s": 0}, "idle_s"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"memory_mb": 0}, "memory_mb"),
        ({"max_in_flight": 10, "max_connections": 10}, "--max-connections 4106 would"),
        ({"outbox_mb": 0}, "outbox_mb"),
        ({"sampling": ["temperature=1"]}, "train:temperature=1"),
        ({"sampling": ["train:temperature"]}, "name=value"),
        ({"sampling": ["train:temperature=hot"]}, "hot"),
        ({"refuse": ["train:"]}, "train:"),
        ({"unknown_flag": 1}, "unknown_flag"),
    ],
    ids=str,
)
def test_a_setting_that_could_not_work_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises((ValidationError, ValueError), match=named):
        Settings(**{"vllm_addresses": "http://127.0.0.1:1", "tokenizer_path": "x", **given})


@pytest.mark.parametrize("missing", ["tokenizer_path", "prompt_length", "response_length"])
def test_on_a_ray_pool_the_tokenizer_and_the_lengths_are_required(missing: str) -> None:
    named = {"vllm_addresses": "http://127.0.0.1:1", "data_pool_name": "data_pool"}
    required = {"tokenizer_path": "x", "prompt_length": 8, "response_length": 8}
    del required[missing]
    with pytest.raises(ValidationError, match=f"--{missing.replace('_', '-')} must be given too"):
        GatewayCommand(**named, **required)


LOADS_WHILE_IT_IMPORTS = """
import asyncio, sys, time
from headrace.gateway.served_model import RendererCache
from headrace.tokens import do_without_torch

do_without_torch()
cache = RendererCache()
cache.prepare()
while "transformers" not in sys.modules:
    time.sleep(0.001)
asyncio.run(cache.load(sys.argv[1], "template"))
"""


def test_a_tokenizer_is_loaded_though_what_it_needs_is_just_being_imported(folder: Path) -> None:
    """Of a fast server the tokenizer is known while transformers is still being imported."""
    command = [sys.executable, "-c", LOADS_WHILE_IT_IMPORTS, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
