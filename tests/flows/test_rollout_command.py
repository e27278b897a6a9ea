"""`headrace rollout` as people run it: with a gateway of its own, stopped, killed, and started again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.command import COMMAND, Done, spawn
from tests.engine.kit import Client
from tests.gateway.kit import until

from headrace.flows.schedule import ScheduleState
from headrace.pool.readonly import JournalView

#: Two calls each; `fails` is how often a row's rollouts crash before they play.
AGENT = """
import httpx

async def solve(task, base_url):
    async with httpx.AsyncClient(timeout=300, trust_env=False) as http:
        for turn in range(2):
            asked = {"model": "m", "messages": [{"role": "user", "content": f"{task['question']} {turn}"}], "max_tokens": 2}
            answer = await http.post(f"{base_url}/v1/chat/completions", json=asked)
            answer.raise_for_status()
"""


class Project:
    """A folder with data, an agent and a configuration whose gateway is started with a journal."""

    def __init__(self, folder: Path, engine: Client, tokenizer: Path, rows: int = 6) -> None:
        self.folder = folder
        (folder / "agent.py").write_text(AGENT)
        data = "".join(json.dumps({"question": f"q {at}", "ground_truth": at}) + "\n" for at in range(rows))
        (folder / "train.jsonl").write_text(data)
        self.config: dict[str, Any] = {
            "data": {"train": "train.jsonl", "n_rollouts": 2},
            "agent": {"run": "agent.py:solve"},
            "gateway": {
                "start": {
                    "vllm_addresses": f"http://{engine.host}",
                    "tokenizer_path": str(tokenizer),
                    "journal": "journal",
                    "durability": "os",
                }
            },
            "rollout": {"batch_size": 2, "max_staleness": 99, "concurrency": 3, "state": "state.json", "poll_s": 0.05},
        }

    @property
    def file(self) -> Path:
        path = self.folder / "rollout.yaml"
        path.write_text(yaml.safe_dump(self.config))
        return path

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, "rollout", str(self.file)],
            stdout=subprocess.PIPE,
            stderr=(self.folder / "stderr.log").open("a"),
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )

    def run(self) -> Done:
        return spawn("rollout", self.file)

    def state(self) -> ScheduleState | None:
        import msgspec

        try:
            return msgspec.json.decode((self.folder / "state.json").read_bytes(), type=ScheduleState)
        except FileNotFoundError:
            return None

    def check(self, groups: int, rollouts: int = 2) -> None:
        """The journal has exactly so many groups, of so many complete rollouts with two steps each."""
        with JournalView(self.folder / "journal") as view:
            rows = view.list_trajectories("train", limit=10_000)["items"]
            assert Counter(row["prompt_uid"] for row in rows if row["complete"]) == Counter(
                {row["prompt_uid"]: rollouts for row in rows}
            )
            assert len({row["prompt_uid"] for row in rows}) == groups
            assert {row["steps"] for row in rows if row["complete"]} == {2}
            assert view.stats()["balanced"]


@pytest.fixture
def project(tmp_path: Path, engine: Client, folder: Path) -> Project:
    return Project(tmp_path, engine, folder)


def test_all_rows_are_played_and_the_last_line_tells_of_it(project: Project) -> None:
    done = project.run()
    assert done.code == 0, done.err
    ready, last = done.out.splitlines()
    assert ready.startswith("rollouter ready on http://127.0.0.1:")
    told = json.loads(last)
    assert {name: told[name] for name in ("finished", "accepted", "rollouts", "failed", "retried", "versions")} == {
        "finished": True,
        "accepted": 6,
        "rollouts": 12,
        "failed": {},
        "retried": 0,
        "versions": [0, 0],
    }
    assert told["seconds"] > 0
    project.check(6)


def test_killed_at_random_moments_it_goes_on_and_every_rollout_is_complete_once(project: Project) -> None:
    draw = random.Random(7)
    admitted = 0
    for _ in range(4):
        process = project.start()
        goal = min(admitted + draw.randint(1, 2), 5)
        until(lambda: (state := project.state()) is not None and state.admitted >= goal)  # noqa: B023
        process.send_signal(signal.SIGKILL)
        process.communicate()
        state = project.state()
        assert state is not None
        admitted = state.admitted
    done = project.run()
    assert done.code == 0, done.err
    told = json.loads(done.out.splitlines()[-1])
    assert (told["finished"], told["accepted"], told["rollouts"]) == (True, 6, 12)
    project.check(6)


def test_a_gateway_that_is_killed_is_started_again_and_nothing_is_lost(project: Project) -> None:
    process = project.start()
    assert process.stdout is not None
    assert process.stdout.readline().startswith("rollouter ready")
    for goal in (2, 4):
        until(lambda: (state := project.state()) is not None and state.accepted >= goal)  # noqa: B023
        killed = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "headrace gateway"], capture_output=True)
        for pid in killed.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, (project.folder / "stderr.log").read_text()
    told = json.loads(out.splitlines()[-1])
    assert (told["finished"], told["accepted"], told["lost"]) == (True, 6, 0)
    assert told["gateway_starts"] >= 2
    project.check(6)


def test_sigterm_ends_it_with_its_place_kept(project: Project) -> None:
    project.config["rollout"] |= {"drain_s": 0, "concurrency": 2}
    process = project.start()
    until(lambda: (state := project.state()) is not None and state.accepted >= 1)
    process.terminate()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, (project.folder / "stderr.log").read_text()
    told = json.loads(out.splitlines()[-1])
    assert not told["finished"]
    state = project.state()
    assert state is not None
    assert (state.accepted, state.rollouts) == (told["accepted"], told["rollouts"])
    done = project.run()
    assert json.loads(done.out.splitlines()[-1])["accepted"] == 6
    project.check(6)


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("rollout", {"batch_sise": 3}, "rollout.batch_sise is not known; did you mean batch_size?"),
        ("rollout", {"validate_every": 1}, "data.val is not: there is nothing to validate with"),
        ("gateway", {"address": "http://127.0.0.1:1"}, "give either address"),
        ("data", {"train": "none.jsonl"}, "none.jsonl"),
        ("agent", {"run": "agent.py:solv"}, "solv"),
        ("agent", {"run": None, "flow": "single_tern"}, "did you mean single_turn?"),
    ],
    ids=["key", "validation", "gateway", "data", "agent", "flow"],
)
def test_what_is_wrong_is_named_before_anything_is_started(
    project: Project, section: str, change: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli import main

    project.config[section] |= change
    with pytest.raises(SystemExit) as ended:
        main(["rollout", str(project.file)])
    assert ended.value.code == 2
    err = capfd.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert not (project.folder / "journal").exists()


def test_an_unknown_flag_of_the_gateway_is_named(project: Project) -> None:
    project.config["gateway"]["start"]["vllm_adresses"] = "x"
    done = project.run()
    assert done.code == 2
    assert "gateway.start.vllm_adresses is no flag of headrace gateway; did you mean vllm_addresses?" in done.err


def test_two_rollouters_do_not_share_a_state(project: Project) -> None:
    project.config["rollout"]["max_staleness"] = 0  # it waits for a trainer that does not come
    process = project.start()
    assert process.stdout is not None
    assert process.stdout.readline().startswith("rollouter ready")
    second = project.run()
    assert second.code == 1
    assert "another rollouter has" in second.err
    process.terminate()
    process.communicate(timeout=300)
    assert process.returncode == 0
