"""`headrace pool start` and `stop`, and the reading commands on `ray-actor://`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.command import Command, fill
from tests.gateway.kit import until

from headrace import connect
from headrace.net.ray_cluster import ActorAddress
from headrace.pool.export import read_steps

pytestmark = pytest.mark.ray

TARGET = "ray-actor://cli_pool?namespace=cli"


def test_a_pool_is_started_read_backed_up_and_stopped(headrace: Command, ray_cluster: str, tmp_path: Path) -> None:
    start = ["pool", "start", "--name", "cli_pool", "--namespace", "cli", "--journal", str(tmp_path / "journal")]
    started = headrace(*start, "--durability", "os", "--channel", "judge:n_rollouts=3")
    assert started.code == 0, started.err
    assert started.out == f"pool ready on {TARGET}\n"
    try:
        again = headrace(*start)
        assert again.code == 2
        assert "an actor 'cli_pool' runs in namespace 'cli' already" in again.err

        with connect(TARGET) as pool:
            fill(pool)
        found = json.loads(headrace("pool", "stats", TARGET, "--json").out)
        assert found["channels"]["train"]["ledger"]["submitted"] == 15
        assert found["channels"]["judge"]["config"]["n_rollouts"] == 3
        assert found["journal"] == str(tmp_path / "journal")
        assert [row["prompt_uid"] for row in headrace("pool", "ls", TARGET).rows] == ["a", "b", "c", "d"]
        assert "step 2: 7 prompt (+2)" in headrace("pool", "show", TARGET, "a-0").out
        assert headrace("pool", "export", TARGET, "--to", tmp_path / "steps.jsonl").code == 0
        assert len(list(read_steps(tmp_path / "steps.jsonl"))) == 15
        assert headrace("pool", "compact", TARGET).code == 0
        assert headrace("pool", "backup", TARGET, "--to", tmp_path / "copy").code == 0
        assert headrace("pool", "verify", tmp_path / "copy").code == 0
    finally:
        stopped = headrace("pool", "stop", TARGET)
    assert (stopped.code, stopped.out) == (0, f"stopped {TARGET}\n")
    gone = headrace("pool", "stop", TARGET)
    assert gone.code == 1
    assert "no actor 'cli_pool' in namespace 'cli'" in gone.err
    at_rest = json.loads(headrace("pool", "stats", tmp_path / "journal", "--json").out)
    assert at_rest["ledger"] == found["ledger"]


def test_an_attached_pool_lives_as_long_as_its_command_and_is_found_again(ray_cluster: str, tmp_path: Path) -> None:
    target = f"ray-actor://attached?namespace=cli&address={ray_cluster}"
    flags = ["--name", "attached", "--namespace", "cli", "--ray-address", ray_cluster]
    command = [sys.executable, "-m", "headrace", "pool", "start", "--attach", *flags]

    def started() -> subprocess.Popen[str]:
        process = subprocess.Popen([*command, "--journal", str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline().startswith("pool ready on ray-actor://attached?")
        return process

    first = started()
    with connect(target, retry_s=240) as pool:
        fill(pool)
        first.kill()
        first.wait()
        second = started()
        try:
            assert pool.stats("train")["ledger"]["submitted"] == 15
        finally:
            second.send_signal(signal.SIGTERM)
        assert second.wait(240) == 0
    until(lambda: ActorAddress("attached", "cli", ray_cluster).handle() is None)  # Ray ends it, but not at once
