"""Any producer, any consumer, as the examples do it: agents to an Atropos trainer, an environment to `fetch_batch`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.gateway.kit import Running
from tests.gateway.rollout import Rollout, in_front, scripted

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def gateway(folder: Path) -> Iterator[Running]:
    """A gateway whose channel the Trajectory API beside it serves and feeds."""
    with scripted(folder) as rollout, in_front(_agreeing(rollout), folder, serve_channel="train") as found:
        yield found


def _agreeing(rollout: Rollout) -> Rollout:
    rollout.script += ["yes", "no"] * 4
    return rollout


def run(name: str, gateway: Running) -> list[str]:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, gateway.address], capture_output=True, text=True, timeout=400
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_an_atropos_trainer_learns_from_agents_behind_the_gateway(gateway: Running) -> None:
    with ThreadPoolExecutor(1) as beside:
        trainer = beside.submit(run, "atropos_trainer.py", gateway)
        for _ in range(2):
            assert len(run("gateway_openai_async.py", gateway)) == 4
        *steps, status = trainer.result()
    assert [line.partition(", loss")[0] for line in steps] == [f"step {n}: 4 sequences in 1 groups" for n in (1, 2)]
    assert all(re.search(r"loss -?\d+\.\d{3}$", line) for line in steps)
    assert status == "{'current_step': 2, 'queue_size': 0}"
    assert gateway.pool.stats("train")["ledger"]["consumed"] == 8


def test_an_atropos_trainer_learns_from_an_environment(gateway: Running) -> None:
    for done in (2, 4):  # a second time as the first
        with ThreadPoolExecutor(1) as beside:
            trainer = beside.submit(run, "atropos_trainer.py", gateway)
            sent = run("atropos_environment.py", gateway)
            *steps, status = trainer.result()
        assert sent == ["{'status': 'received'}"] * 2 + ["{'status': 'success'}"]
        assert [line.partition(", loss")[0] for line in steps] == [f"step {n}: 4 sequences in 1 groups" for n in (1, 2)]
        assert status == f"{{'current_step': {done}, 'queue_size': 0}}"


def test_fetch_batch_serves_what_an_environment_scored(gateway: Running) -> None:
    for consumed in (8, 16):  # a second time as the first
        with ThreadPoolExecutor(1) as beside:
            trainer = beside.submit(run, "atropos_fetch.py", gateway)
            run("atropos_environment.py", gateway)
            lines = trainer.result()
        assert [line.partition(", reward")[0] for line in lines] == ["8 tokens, 5 of them sampled"] * 8
        assert {line.rpartition(" ")[2] for line in lines} == {"0.0", "1.0"}
        ledger = gateway.pool.stats("train")["ledger"]
        assert (ledger["consumed"], ledger["queued"]) == (consumed, 0)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("atropos_*")), ids=lambda path: path.name)
def test_an_example_fits_on_a_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 45
