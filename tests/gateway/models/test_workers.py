"""Several processes with a file of models behave as one gateway, whatever becomes of the file."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
from tests.engine.kit import Client
from tests.gateway.kit import told
from tests.gateway.test_workers import PATIENCE_S, await_all, fresh, started

from headrace import connect


def test_a_worker_that_is_replaced_knows_the_models_and_the_version_of_each(
    engine: Client, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"models": {"second": {}}}))
    with started(engine, folder, tmp_path / "journal", "--models", str(file)) as gateway:
        file.unlink()
        told(fresh("POST", f"{gateway.address}/policy_version", {"version": 4}))
        told(fresh("POST", f"{gateway.address}/policy_version", {"version": 2, "model": "second"}))
        victim = gateway.workers[0]
        victim.kill()
        psutil.wait_procs([victim], PATIENCE_S)
        await_all(gateway)
        begun = told(fresh("POST", f"{gateway.address}/init_trajectory"))
        for _ in range(6):
            for model in ("first", "second"):
                asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
                told(fresh("POST", f"{begun['base_url']}/v1/chat/completions", asked))
        told(fresh("POST", f"{begun['base_url']}/v1/complete_trajectory", {"reward": 1.0}))
        pool = connect(gateway.address)
        for held, version in ((begun["trajectory_uid"], 4), (f"{begun['trajectory_uid']}@second", 2)):
            found = pool.trajectory(held)
            assert found.complete
            assert [step.policy_version for step in found.steps] == [version] * 6
