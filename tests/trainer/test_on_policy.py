"""Engine, gateway, pool and trainer agree on every token: on policy, before the first update, each ratio is 1."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.kit import Client
from tests.gateway.kit import Running, running_gateway, told, until

from headrace import DataPool
from headrace.trainer import Trainer, TrainerConfig

VERSIONS = 3
GROUPS, ROLLOUTS = 2, 4


@pytest.fixture
def gateway(own: Client, folder: Path) -> Iterator[Running]:
    channels = {"train": {"n_rollouts": ROLLOUTS}}
    with (
        DataPool(channels=channels) as pool,
        running_gateway(pool, f"http://{own.host}", folder, open=True) as found,
    ):
        yield found


def play(gateway: Running, version: int, temperature: float) -> None:
    """A batch of two-turn conversations; even rollouts win."""
    for group in range(GROUPS):
        for rollout in range(ROLLOUTS):
            uid = f"v{version}-g{group}-r{rollout}"
            base = f"/{uid}/v{version}-g{group}/v1"
            messages = [{"role": "user", "content": f"guess {group}"}]
            for turn in range(2):
                asked = {"model": "m", "messages": messages, "max_tokens": 6, "temperature": temperature}
                answer = told(gateway.post(f"{base}/chat/completions", {**asked, "seed": 10 * rollout + turn}))
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "higher"}]
            told(gateway.post(f"{base}/complete_trajectory", {"reward": float(rollout % 2 == 0)}))


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("temperature", "lora"),
    [(1.0, None), pytest.param(0.7, None, marks=pytest.mark.long), (1.0, {"rank": 4, "lr": 3e-2})],
    ids=["1.0", "0.7", "an adapter, merged"],
)
def test_ratios_are_one_before_the_first_update_of_every_version(
    gateway: Running, folder: Path, tmp_path: Path, temperature: float, lora: dict[str, Any] | None
) -> None:
    config = TrainerConfig.model_validate(
        {
            "model": folder,
            "run": tmp_path / "run",
            "steps": VERSIONS,
            "pool": {"address": gateway.address, "batch_size": GROUPS, "prefetch": False},
            "optimizer": {"lr": 3e-3},
            "lora": lora,
            "sync": {"gateway": gateway.address},
            "checkpoint": {"every": 1},
        }
    )
    trainer = Trainer(config)
    running = threading.Thread(target=trainer.run)
    running.start()
    for version in range(VERSIONS):
        until(lambda wanted=version: told(gateway.get("/policy_version"))["version"] == wanted)
        play(gateway, version, temperature)
    running.join(240)
    assert not running.is_alive()
    found = rows(config.run)
    assert [row["staleness_max"] for row in found] == [0, 0, 0]
    assert max(row["ratio_first_max"] for row in found) < 1e-3
    assert max(row["on_policy_gap"] for row in found) < 1e-3
    assert max(row["logprob_gap_max"] for row in found if "logprob_gap_max" in row) < 1e-3
    # It did learn in between: what was sampled under the first version is less likely to be so under the last.
    assert min(row["grad_norm"] for row in found) > 0
    assert told(gateway.get("/policy_version"))["version"] == VERSIONS
    ledger = gateway.pool.stats()["ledger"]
    assert ledger["consumed"] == ledger["submitted"] == VERSIONS * GROUPS * ROLLOUTS * 2
