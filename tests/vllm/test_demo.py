"""The demo's loop with a real vLLM as its rollout server: it learns, and after every sync the two agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.vllm.server import vllm

from headrace.demo.model import build
from headrace.demo.run import DemoOptions, play

VERSIONS = 24


@pytest.mark.long
def test_agents_learn_from_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(tmp_path / "model", seed=0)
    run = tmp_path / "run"
    with vllm(model, tmp_path / "vllm.log", max_model_len=128) as address:
        options = DemoOptions(task="number3", steps=VERSIONS, engine="vllm", vllm_addresses=address, model=str(model))
        play(options, run)
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = [json.loads(line) for line in (run / "trainer" / "metrics.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == list(range(1, VERSIONS + 1))
    synced = {row["sync"]["version"]: row["logprob_gap_max"] for row in rows}
    assert len(synced) >= 20
    assert max(synced.values()) < 1e-3
    assert not any(row["sync"]["failed"] for row in rows)
    first, last = (sum(row["reward"] for row in part) / len(part) for part in (rows[:5], rows[-5:]))
    assert last > first + 0.1
    assert verdict["logprob_gap_max"] < 1e-3
