"""`headrace train`: what it would do, and that it does it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.command import Command
from tests.pool.servers import serving
from tests.trainer.kit import submit_group

from headrace import DataPool

#: Nothing listens there.
DEAD = "http://127.0.0.1:9"


@pytest.fixture
def pool() -> Iterator[DataPool]:
    with DataPool(channels={"train": {"n_rollouts": 2}}) as found:
        yield found


@pytest.fixture
def config(pool: DataPool, folder: Path, tmp_path: Path) -> Iterator[Path]:
    """A file for a run of one step on that pool."""
    with serving(pool) as address:
        path = tmp_path / "train.yaml"
        given: dict[str, Any] = {"model": str(folder), "run": str(tmp_path / "run"), "steps": 1}
        given |= {"pool": {"address": address, "batch_size": 2}, "optimizer": {"lr": 1e-3}, "checkpoint": {"every": 1}}
        path.write_text(yaml.safe_dump(given))
        yield path


def submitted(pool: DataPool, groups: int) -> None:
    for at in range(groups):
        submit_group(pool, f"g{at}", [0.0, 1.0], vocabulary=300)


def test_a_dry_run_tells_configuration_memory_and_the_first_batch_and_changes_nothing(
    headrace: Command, config: Path, pool: DataPool, tmp_path: Path
) -> None:
    submitted(pool, 2)
    done = headrace("train", config, "--dry-run")
    assert done.code == 0, done.err
    said = {next(iter(part)): part for part in yaml.safe_load_all(done.out.replace("# ", "---\n# "))}
    assert said["model"]["algorithm"]["advantage"] == "grpo"
    assert said["parameters"]["together"].endswith("GiB on cpu")
    assert said["groups"] == {
        "groups": 2,
        "trajectories": 4,
        "sequences": 4,
        "tokens": 28,
        "targets": 16,
        "longest": 7,
        "reward": 0.5,
        "skipped": [],
    }
    assert not (tmp_path / "run").exists()
    assert pool.stats()["channels"]["train"]["groups"]["ready"] == 2


def test_a_dry_run_says_how_much_of_a_batch_is_there(headrace: Command, config: Path, pool: DataPool) -> None:
    submitted(pool, 1)
    assert "1 of the 2 that a batch takes" in headrace("train", config, "--dry-run").out


def test_a_pools_key_is_taken_from_the_environment(
    headrace: Command, pool: DataPool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(pool, 2)
    path = tmp_path / "keyed.yaml"
    with serving(pool, key="secret") as address:
        given = {"model": str(folder), "run": str(tmp_path / "run"), "pool": {"address": address, "batch_size": 2}}
        path.write_text(yaml.safe_dump(given))
        assert headrace("train", path, "--dry-run").code == 1
        monkeypatch.setenv("HEADRACE_POOL_KEY", "secret")
        assert headrace("train", path, "--dry-run").code == 0


def test_a_run_trains_and_a_second_needs_resume(
    headrace: Command, config: Path, pool: DataPool, tmp_path: Path
) -> None:
    submitted(pool, 4)
    done = headrace("train", config)
    assert done.code == 0, done.err
    assert "trainer ready at step 0, version 0" in done.out
    assert "1 steps, version 1, 4 trajectories, 16 tokens" in done.out
    assert "--resume" in headrace("train", config).err
    again = headrace("train", config, "--resume", "--steps", "2")
    assert again.code == 0, again.err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]


def test_a_file_that_cannot_work_is_bad_usage(headrace: Command, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("model: m\nrun: r\nstep: 4\n")
    done = headrace("train", path)
    assert done.code == 2
    assert "step is not known; did you mean steps?" in done.err


def test_a_model_that_is_not_there_is_said(headrace: Command, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(f"model: {tmp_path / 'nothing'}\nrun: {tmp_path / 'run'}\n")
    done = headrace("train", path)
    assert done.code == 2
    assert f"there is no folder {tmp_path / 'nothing'}" in done.err
    assert "hub name" in done.err


def test_a_folder_without_a_checkpoint_is_said(headrace: Command, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(f"model: {tmp_path}\nrun: {tmp_path / 'run'}\n")
    done = headrace("train", path, "--dry-run")
    assert done.code == 2
    assert "has no config.json" in done.err


def test_a_dry_run_needs_neither_gateway_nor_pool(headrace: Command, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    given: dict[str, Any] = {"model": str(folder), "run": str(tmp_path / "run"), "pool": {"address": DEAD}}
    path.write_text(yaml.safe_dump({**given, "sync": {"gateway": DEAD}}))
    done = headrace("train", path, "--dry-run")
    assert done.code == 0, done.err
    assert "GiB on" in done.out
    assert "gateway: 'is not ready: connection refused" in done.out
    assert f"the pool {DEAD} does not answer: connection" in " ".join(done.out.split())
    assert f"go to the gateway {DEAD} after each step" in " ".join(done.out.split())


def test_a_run_that_learned_nothing_fails_and_says_why(
    headrace: Command, config: Path, pool: DataPool, tmp_path: Path
) -> None:
    for at in range(2):
        submit_group(pool, f"g{at}", [1.0, 1.0], vocabulary=300)
    done = headrace("train", config)
    assert done.code == 1
    assert "skipped out of 2 groups: 2 groups with equal rewards only" in done.out
    assert "headrace: nothing was learned in 1 step: skipped: 2 groups with equal rewards only" in done.err
    assert "nothing was learned in step 1" in done.err  # and while it ran
    again = headrace("train", config, "--resume")  # its one step is done
    assert again.code == 0, again.err
    assert "nothing to do" in again.out


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_a_loss_of_ones_own_that_cannot_work_is_said_before_anything_else(
    headrace: Command, tmp_path: Path, flags: list[str]
) -> None:
    (tmp_path / "mine.py").write_text("def loss(batch):\n    return batch.log_probs.mean()\n")
    path = tmp_path / "train.yaml"
    given = {"model": "nobody/nothing", "run": str(tmp_path / "run"), "algorithm": {"loss": "mine.py:loss"}}
    path.write_text(yaml.safe_dump(given))
    done = headrace("train", path, *flags)
    assert done.code == 2
    assert f"{tmp_path / 'mine.py'}:loss" in done.err
    assert "not a mean" in done.err
    assert not (tmp_path / "run").exists()
