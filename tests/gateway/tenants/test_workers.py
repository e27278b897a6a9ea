"""Several processes keep tenants apart as one does, whatever becomes of the file."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from tests.engine.kit import Client
from tests.gateway.kit import await_ready, told
from tests.gateway.test_workers import PATIENCE_S, started

from headrace import connect


def test_tenants_are_apart_in_every_worker(engine: Client, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    file.write_text(json.dumps({"tenants": {name: {"keys": [f"{name}-key"]} for name in ("one", "two")}}))
    flags = ("--tenants", str(file), "--admin-key", "admin")
    with started(engine, folder, tmp_path / "journal", *flags) as gateway:
        file.unlink()
        await_ready(gateway.address)

        def ask(path: str, key: str, body: object) -> httpx.Response:
            """A request on a connection of its own, so that any of the workers may get it."""
            with httpx.Client(timeout=PATIENCE_S, trust_env=False, headers={"x-api-key": key}) as http:
                return http.post(f"{gateway.address}{path}", json=body)

        told(ask("/init_trajectory", "one-key", {"trajectory_uid": "t", "prompt_uid": "p"}))
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        for _ in range(6):
            assert ask("/t/p/v1/chat/completions", "one-key", body).status_code == 200
            assert ask("/t/p/v1/chat/completions", "two-key", body).status_code == 404
            assert ask("/t/p/v1/chat/completions", "three-key", body).status_code == 401
        assert len(connect(gateway.address, key="admin").trajectory("one/t")) == 6
        told(ask("/t/p/complete_trajectory", "one-key", {"reward": 1.0}))
        answers = [ask("/t/p/v1/chat/completions", "one-key", body).status_code for _ in range(12)]
        assert answers == [409] * 12, "a worker did not hear that the trajectory is complete"


def test_a_tenants_bound_is_one_over_all_workers(engine: Client, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    bounds = {"keys": ["key"], "calls_per_s": 1e-6, "burst": 5}
    file.write_text(json.dumps({"tenants": {"other": {"keys": ["no"]}, "one": bounds}}))
    with started(engine, folder, tmp_path / "journal", "--tenants", str(file), "--admin-key", "admin") as gateway:
        await_ready(gateway.address)
        statuses = []
        for _ in range(24):
            with httpx.Client(timeout=PATIENCE_S, trust_env=False, headers={"x-api-key": "key"}) as http:
                statuses.append(http.post(f"{gateway.address}/init_trajectory").status_code)
        assert sorted(statuses) == [200] * 5 + [429] * 19
