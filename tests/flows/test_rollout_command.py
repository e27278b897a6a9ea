"""`headrace rollout` as people run it: with a gateway of its own, stopped, killed, and started again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from tests.cli.command import COMMAND, Done, spawn
from tests.engine.kit import Client
from tests.gateway.kit import running_gateway, until

from headrace import DataPool
from headrace.cli import main
from headrace.flows.schedule_state import ScheduleState
from headrace.pool.readonly import JournalView
from headrace.processes import INTERRUPTED

pytestmark = pytest.mark.system

#: Two calls a rollout; while there is a file `hold`, question 3 is not answered.
AGENT = """
import asyncio, pathlib
import httpx

HOLD = pathlib.Path(__file__).with_name("hold")

async def solve(task, base_url):
    while task["question"] == "q 3" and HOLD.exists():
        await asyncio.sleep(0.01)
    async with httpx.AsyncClient(timeout=300, trust_env=False) as http:
        for turn in range(2):
            said = {"role": "user", "content": f"{task['question']} {turn}"}
            asked = {"model": "m", "messages": [said], "max_tokens": 2}
            answer = await http.post(f"{base_url}/v1/chat/completions", json=asked)
            answer.raise_for_status()
"""


class Project:
    """A folder with data, an agent and a configuration, whose gateway runs or is to be started."""

    def __init__(self, folder: Path, gateway: dict[str, Any], rows: int = 6) -> None:
        self.folder = folder
        (folder / "agent.py").write_text(AGENT)
        data = "".join(json.dumps({"question": f"q {at}", "ground_truth": at}) + "\n" for at in range(rows))
        (folder / "train.jsonl").write_text(data)
        self.config: dict[str, Any] = {
            "data": {"train": "train.jsonl", "n_rollouts": 2},
            "agent": {"run": "agent.py:solve"},
            "gateway": gateway,
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
        try:
            return msgspec.json.decode((self.folder / "state.json").read_bytes(), type=ScheduleState)
        except FileNotFoundError:
            return None


def check(pool: DataPool | JournalView, groups: int, rollouts: int = 2) -> None:
    """The pool has exactly so many groups, of so many complete rollouts with two steps each."""
    rows = pool.list_trajectories("train", limit=10_000)["items"]
    complete = [row for row in rows if row["complete"]]
    assert Counter(row["prompt_uid"] for row in complete) == {row["prompt_uid"]: rollouts for row in rows}
    assert len({row["prompt_uid"] for row in rows}) == groups
    assert {row["steps"] for row in complete} == {2}
    assert pool.stats()["balanced"]


@pytest.fixture
def journaled(tmp_path: Path) -> Iterator[DataPool]:
    with DataPool(tmp_path / "journal", durability="os") as pool:
        yield pool


@pytest.fixture
def project(tmp_path: Path, journaled: DataPool, engine: Client, folder: Path) -> Iterator[Project]:
    """A project whose gateway runs."""
    with running_gateway(journaled, f"http://{engine.host}", folder) as gateway:
        yield Project(tmp_path, {"address": gateway.address})


@pytest.fixture
def starting(tmp_path: Path, engine: Client, folder: Path) -> Project:
    """A project that starts its gateway, with a journal."""
    flags = {"vllm_addresses": f"http://{engine.host}", "tokenizer_path": str(folder)}
    return Project(tmp_path, {"start": {**flags, "journal": "journal", "durability": "os"}})


def test_killed_at_random_moments_it_goes_on_and_every_rollout_is_complete_once(
    project: Project, journaled: DataPool
) -> None:
    draw = random.Random(7)
    admitted = 0
    for _ in range(3):
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
    check(journaled, 6)


def test_with_a_gateway_of_its_own_that_is_killed_all_rows_are_played(starting: Project) -> None:
    hold = starting.folder / "hold"
    hold.touch()  # so that it has not ended before its gateway is killed
    process = starting.start()
    assert process.stdout is not None
    assert process.stdout.readline().startswith("rollouter ready on http://127.0.0.1:")
    until(lambda: (state := starting.state()) is not None and state.accepted >= 2)
    killed = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "headrace gateway"], capture_output=True)
    for pid in killed.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    hold.unlink()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, (starting.folder / "stderr.log").read_text()
    told = json.loads(out.splitlines()[-1])
    assert {
        name: told[name] for name in ("finished", "accepted", "rollouts", "lost", "gateway_starts", "versions")
    } == {
        "finished": True,
        "accepted": 6,
        "rollouts": 12,
        "lost": 0,
        "gateway_starts": 2,
        "versions": [0, 0],
    }
    assert told["seconds"] > 0
    with JournalView(starting.folder / "journal") as view:
        check(view, 6)


def test_sigterm_ends_it_with_its_place_kept(project: Project, journaled: DataPool) -> None:
    project.config["rollout"] |= {"drain_s": 0}
    hold = project.folder / "hold"
    hold.touch()
    process = project.start()
    until(lambda: (state := project.state()) is not None and state.accepted == 5)
    second = project.run()
    assert second.code == 1
    assert "another rollouter has" in second.err
    process.terminate()
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, (project.folder / "stderr.log").read_text()
    told = json.loads(out.splitlines()[-1])
    assert (told["finished"], told["accepted"]) == (False, 5)
    hold.unlink()
    done = project.run()
    assert json.loads(done.out.splitlines()[-1])["accepted"] == 6
    check(journaled, 6)


def test_ctrl_c_ends_it_while_the_agents_file_is_imported(tmp_path: Path) -> None:
    project = Project(tmp_path, {"address": "http://127.0.0.1:9"})
    (tmp_path / "agent.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('importing').touch()\ntime.sleep(3600)\n"
    )
    process = project.start()
    try:
        until(lambda: (tmp_path / "importing").exists())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in (tmp_path / "stderr.log").read_text()


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("rollout", {"batch_sise": 3}, "rollout.batch_sise is not known; did you mean batch_size?"),
        ("rollout", {"validate_every": 1}, "data.val is not: there is nothing to validate with"),
        ("gateway", {"address": "http://127.0.0.1:1"}, "give either address"),
        (
            "gateway",
            {"start": {"vllm_adresses": "x"}},
            "gateway.start.vllm_adresses is no flag of headrace gateway; did you mean vllm_addresses?",
        ),
        ("data", {"train": "none.jsonl"}, "none.jsonl"),
        ("agent", {"run": "agent.py:solv"}, "solv"),
        ("agent", {"run": None, "flow": "single_tern"}, "did you mean single_turn?"),
    ],
    ids=["key", "validation", "gateway", "flag", "data", "agent", "flow"],
)
def test_what_is_wrong_is_named_before_anything_is_started(
    starting: Project, section: str, change: dict[str, Any], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    starting.config[section] |= change
    with pytest.raises(SystemExit) as ended:
        main(["rollout", str(starting.file)])
    assert ended.value.code == 2
    err = capfd.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert not (starting.folder / "journal").exists()
