"""Server, environment and `headrace train`, each a process, and no call made by hand: the environment is let in, feeds
the trainer, evaluates as it goes, and finishes when the trainer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.demo.model import build
from headrace.processes import Child, Processes

EXAMPLE = Path(__file__).parents[2] / "examples" / "env_number.py"
STEPS, GROUPS, GROUP_SIZE = 4, 2, 8
#: Seconds that a process may take to end, on a machine that is busy with other things.
PATIENCE_S = 600.0


@pytest.fixture
def children(tmp_path: Path) -> Any:
    with Processes(tmp_path) as found:
        yield found


def ended(child: Child) -> tuple[int, str]:
    return child.process.wait(PATIENCE_S), child.said()


@pytest.mark.timeout(900)
def test_an_environment_feeds_headrace_train_without_a_call_by_hand(children: Processes, tmp_path: Path) -> None:
    build(tmp_path / "model", seed=0)
    serve = ("headrace", "serve", "--engine", tmp_path / "model", "--host", "127.0.0.1", "--port", "0")
    server = children.start("server", *serve, "--serve-channel", "train").ready("gateway")
    flags = {
        "rollout_server_url": server,
        "use_wandb": "false",
        "ensure_scores_are_not_same": "false",
        "group_size": GROUP_SIZE,
        "status_poll_s": 0.05,
        "steps_per_eval": 2,
        "total_steps": -1,  # as many as the trainer makes
        "data_dir_to_save_evals": tmp_path / "evals",
        "spool_dir": tmp_path / "spool",
    }
    environment = children.start(
        *("environment", "headrace", "env", EXAMPLE, "serve"),
        *("--openai.server_type", "gateway", "--openai.base_url", server),
        *(part for name, value in flags.items() for part in (f"--env.{name}", value)),
    )
    config = {
        "model": str(tmp_path / "model"),
        "run": str(tmp_path / "run"),
        "steps": STEPS,
        "threads": 1,
        "pool": {"address": server, "batch_size": GROUPS, "prefetch": False},
        "algorithm": {"skip_zero_variance": False, "entropy": 0.01},
        "sync": {"gateway": server},
    }
    (tmp_path / "train.yaml").write_bytes(msgspec.json.encode(config))
    trainer = children.start("trainer", "headrace", "train", tmp_path / "train.yaml")
    assert ended(trainer)[0] == 0, trainer.said()
    code, said = ended(environment)
    assert code == 0, said
    assert "registered as number_0 (environment 0) at step 0" in said
    assert "evaluating at step 2" in said
    assert "evaluating at step 4" in said
    assert "the trainer has ended at step 4" in said
    rows = [msgspec.json.decode(line) for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()]
    assert [(row["groups"], row["trajectories"], row["updates"]) for row in rows] == [
        (GROUPS, GROUPS * GROUP_SIZE, 1)
    ] * STEPS
    with httpx.Client(base_url=server, trust_env=False) as api:
        assert api.get("/status").json()["current_step"] == STEPS
        answer = api.get("/status-env", params={"env_id": 0}).json()
    assert (answer["ended_at"], answer["current_step"]) == (STEPS, STEPS + 1)
