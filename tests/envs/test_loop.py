"""Server, environment and `headrace train`, each a process, and no call made by hand: the environment is let in, feeds
the trainer, evaluates, and finishes when the trainer does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.envs.kit import CountingEnv
from tests.gateway.kit import serving

from headrace import DataPool
from headrace.api.app import create_app
from headrace.api.settings import TrajectoryApiSettings
from headrace.demo.model import build
from headrace.envs import BaseEnvConfig
from headrace.pool.scored.types import Registration
from headrace.processes import Child, Processes

pytestmark = pytest.mark.system

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
        "steps_per_eval": STEPS,
        "total_steps": 1000,  # more than the trainer makes: only its end ends the environment
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
    assert f"evaluating at step {STEPS}" in said
    assert f"the trainer has ended at step {STEPS}" in said
    assert (tmp_path / "evals" / "metrics.json").is_file()
    rows = [msgspec.json.decode(line) for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()]
    assert [(row["groups"], row["trajectories"], row["updates"]) for row in rows] == [
        (GROUPS, GROUPS * GROUP_SIZE, 1)
    ] * STEPS
    with httpx.Client(base_url=server, timeout=PATIENCE_S, trust_env=False) as api:
        assert api.get("/status").json()["current_step"] == STEPS
        answer = api.get("/status-env", params={"env_id": 0}).json()
    assert (answer["ended_at"], answer["current_step"]) == (STEPS, STEPS + 1)


class EvaluatedEnv(CountingEnv):
    """Notes the steps at which it is evaluated and saved."""

    async def setup(self) -> None:
        self.evaluated: list[int] = []
        self.saved: list[int] = []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.evaluated.append(self.curr_step)

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        self.saved.append(step)


async def test_who_fetches_is_followed_to_its_end() -> None:
    """It evaluates and saves by the steps of a trainer that knows nothing of environments but its registration."""
    about = Registration("", "", 4, -1, "", 3, 0, 1000, batch_groups=2)
    with DataPool() as pool, serving(create_app(pool, TrajectoryApiSettings(serve_channel="train"))) as address:
        uuid = pool.desk_register(about).uuid
        fields = {"group_size": 2, "status_poll_s": 0.01, "steps_per_eval": 3, "use_wandb": False}
        env = EvaluatedEnv(BaseEnvConfig(rollout_server_url=address, **fields))
        work = asyncio.create_task(env.env_manager())
        for _ in range(3):
            assert await pool.aio.fetch_batch(2) is not None
        await pool.aio.desk_end(uuid)
        await work
        assert pool.desk_status().step == 3
    assert (env.curr_step, env.evaluated, env.saved) == (3, [3], [3])
    assert env.config.batch_size == 4
