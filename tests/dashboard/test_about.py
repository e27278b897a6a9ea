"""What a run says of itself: kept in its folder, and on its page wherever that is made."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from starlette.testclient import TestClient
from tests.dashboard.test_follow import submit
from tests.dashboard.test_single_file import answers_of

from headrace import DataPool
from headrace.dashboard.about import ABOUT_FILE, About, AboutSection, AboutTable, read_about, write_about
from headrace.dashboard.dashboard import Dashboard
from headrace.dashboard.login import DashboardLogin
from headrace.dashboard.routes import dashboard_app
from headrace.dashboard.single_file import collect
from headrace.dashboard.source import RunningPool

ABOUT = About("a run", "It learned.", [AboutSection("Where", ["here"], [AboutTable(["a", "b"], [["x", 1.5]])])])


def test_what_a_run_says_is_read_back_and_what_is_no_such_file_is_none(tmp_path: Path) -> None:
    assert read_about(tmp_path / ABOUT_FILE) is None
    assert write_about(tmp_path, ABOUT) == tmp_path / ABOUT_FILE
    assert read_about(tmp_path / ABOUT_FILE) == ABOUT
    (tmp_path / ABOUT_FILE).write_text('{"title": 3}')
    assert read_about(tmp_path / ABOUT_FILE) is None


def test_a_dashboard_answers_with_it_and_a_file_holds_it() -> None:
    async def collected(pool: DataPool) -> object:
        async with Dashboard(RunningPool(pool, "here"), about=lambda: ABOUT) as dashboard:
            return (await collect(dashboard))["about"]

    with DataPool() as pool:
        assert asyncio.run(collected(pool)) == msgspec.to_builtins(ABOUT)
        with TestClient(dashboard_app(Dashboard(RunningPool(pool, "here")), DashboardLogin(None))) as client:
            assert client.get("/dashboard/api/about").json()["title"] == ""
            assert client.get("/dashboard/api/choices").json()["about"] is None


def exported(run: Path, page: Path) -> dict[str, Any]:
    # A process of its own: the command does without torch, which other tests need.
    command = [sys.executable, "-m", "headrace", "dashboard", str(run), "--export", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return answers_of(page.read_text())


def test_the_folder_of_a_run_stands_for_its_journal_its_curves_and_what_it_says(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "trainer").mkdir(parents=True)
    (run / "trainer" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    write_about(run, ABOUT)
    alone = exported(run, tmp_path / "alone.html")  # its journal is elsewhere, as a cluster's may be
    assert (alone["about"]["title"], alone["trajectories"]) == ("a run", [])
    with DataPool(run / "journal", durability="os", defaults={"n_rollouts": 2}) as pool:
        submit(pool, 0)
    whole = exported(run, tmp_path / "whole.html")
    assert (whole["about"]["title"], len(whole["trajectories"])) == ("a run", 2)
    assert whole["curves"]["reward"] == {"step": [1.0], "reward": [0.5]}
