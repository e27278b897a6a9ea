"""`headrace reward start` as a process beside a pool, killed and started again, and `headrace reward try`."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.cli.command import COMMAND, Command
from tests.gateway.kit import serving, until
from tests.pool.servers import serving as serving_pool
from tests.rewards.recorded import record

from headrace import DataPool, connect
from headrace.tokens import Renderer, load_renderer

PATIENCE_S = 240

#: A function's file that is imported for longer than any test takes, and says that it is.
SLOW = """
import os, pathlib, time
pathlib.Path(__file__).with_name("part").write_text(str(os.getpid()))
os.replace(pathlib.Path(__file__).with_name("part"), pathlib.Path(__file__).with_name("importing"))
time.sleep(3600)
def score(sample): return 0.0
"""


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return load_renderer(folder)


class Judge:
    """An OpenAI-compatible server whose verdicts are held until `go`; it gives an answer a point a letter."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()

    async def verdict(self, request: Request) -> JSONResponse:
        case = json.loads((await request.json())["messages"][-1]["content"])
        self.asked.append(case["answer"])
        await asyncio.to_thread(self.go.wait, PATIENCE_S)
        said = f"Well.\nScore: {len(case['answer'])}"
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        return JSONResponse({"choices": [{"message": {"content": said}}], "usage": usage})

    @contextmanager
    def serving(self) -> Iterator[str]:
        app = Starlette(routes=[Route("/v1/chat/completions", self.verdict, methods=["POST"])])
        with serving(app) as address:
            yield address
            self.go.set()


class Loop:
    """A `headrace reward start`, ready."""

    def __init__(self, reward: Path, pool: str, folder: Path, *more: str) -> None:
        flags = ["--reward", str(reward), "--pool", pool, "--tokenizer-path", str(folder), *more]
        self.process = subprocess.Popen([*COMMAND, "reward", "start", *flags], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"reward loop ready on {pool}\n"

    def end(self, how: signal.Signals) -> str:
        self.process.send_signal(how)
        return self.process.communicate(timeout=PATIENCE_S)[0]


def write(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(json.dumps(values))
    return path


@pytest.mark.system
def test_a_killed_loop_loses_nothing_and_agents_do_not_wait_for_the_judge(
    renderer: Renderer, folder: Path, tmp_path: Path
) -> None:
    judge = Judge()
    with judge.serving() as address, DataPool() as pool, serving_pool(pool) as target:
        reward = write(tmp_path / "reward.json", {"judge": {"address": address, "model": "j"}, "timeout_s": PATIENCE_S})
        first = Loop(reward, target, folder, "--channel", "train", "--channel", "val")
        assert pool.stats("val")["config"]["require_reward"]
        with connect(target) as agent:
            record(agent, renderer, "t0", [("q", "abc")], prompt_uid="p", n_rollouts=2, row={"answer": "x"})
            until(lambda: judge.asked == ["abc"])
            # The judge thinks; the agents are answered all the same, over HTTP, and go on.
            record(agent, renderer, "t1", [("q", "abcde")], prompt_uid="p", n_rollouts=2)
            assert agent.complete("t1").status == "ok"
            record(agent, renderer, "v0", [("q", "a")], channel="val")
        until(lambda: sorted(judge.asked) == ["a", "abc", "abcde"])
        first.end(signal.SIGKILL)
        assert [row["reward"] for row in pool.list_trajectories()["items"]] == [None, None]
        judge.go.set()
        second = Loop(reward, target, folder, "--channel", "train", "--channel", "val")
        batch = pool.fetch_batch(1, timeout=PATIENCE_S)
        assert batch is not None
        assert batch.groups[0].rewards == [0.3, 0.5]
        val = pool.fetch_batch(1, channel="val", timeout=PATIENCE_S)
        assert val is not None
        assert val.groups[0].rewards == [0.1]
        assert {step.metadata["reward_source"] for step in [*batch.steps, *val.steps]} == {"model"}
        told = json.loads(second.end(signal.SIGTERM))
        assert told == {"scored": 3, "kept": 0, "late": 0, "quarantined": 0, "waited": 0, "failures": {}}
        assert second.process.returncode == 0
        assert pool.stats()["balanced"]


@pytest.mark.system
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_is_stopped_while_functions_are_imported(folder: Path, tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    reward = write(tmp_path / "reward.json", {"functions": ["slow.py:score"]})
    flags = ["--reward", reward, "--pool", "http://127.0.0.1:9", "--tokenizer-path", folder]
    process = subprocess.Popen([*COMMAND, "reward", "start", *map(str, flags)], stdout=subprocess.PIPE, text=True)
    try:
        until(lambda: (tmp_path / "importing").exists())
        child = int((tmp_path / "importing").read_text())
        process.send_signal(how)
        out, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 0
    assert json.loads(out)["scored"] == 0
    assert not psutil.pid_exists(child)


@pytest.fixture
def recorded(tmp_path: Path, renderer: Renderer) -> Iterator[Path]:
    """A journal that a pool has open: two groups that are queued and one that was consumed, all with rewards."""
    with DataPool(tmp_path / "journal", durability="os", channels={"train": {"n_rollouts": 2}}) as pool:
        for group, rollouts in {
            "used": [("yes", 1.0), ("no", 0.0)],
            "turned": [("yes", 0.0), ("no", 1.0)],
            "tied": [("no", 1.0), ("no", 0.5)],
        }.items():
            for n, (said, reward) in enumerate(rollouts):
                record(pool, renderer, f"{group}-{n}", [("right?", said)], prompt_uid=group, row={"answer": "yes"})
                pool.reward(f"{group}-{n}", reward)
        record(pool, renderer, "lost", [("right?", "yes")], prompt_uid="lost")  # its row has no ground truth
        assert pool.fetch_batch(1, timeout=0) is not None
        yield tmp_path / "journal"


def test_a_trial_compares_with_what_is_recorded_and_changes_nothing(
    headrace: Command, recorded: Path, folder: Path, tmp_path: Path
) -> None:
    reward = write(tmp_path / "reward.json", {"rules": [{"use": "exact_match", "weight": 2.0}]})
    before = {path.name: path.read_bytes() for path in recorded.glob("*.seg")}
    command = ["reward", "try", reward, "--pool", recorded, "--tokenizer-path", folder]
    done = headrace(*command, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["trajectories"], found["groups"], found["scored"]) == (7, 4, 6)
    assert found["failed"] == {"error": 1}
    assert found["failures"][0]["trajectory_uid"] == "lost"
    assert (found["rewards"]["mean"], found["rewards"]["max"], found["rewards"]["count"]) == (
        pytest.approx(2 / 3),
        2,
        6,
    )
    assert found["rewards_before"]["mean"] == pytest.approx(3.5 / 6)
    assert found["ties"] == {"groups": 3, "tied": 1, "tied_before": 0}
    assert found["signs"] == {"trajectories": 6, "changed": 2, "groups": 3, "groups_changed": 1}
    (worst,) = found["worst_groups"]
    assert worst["prompt_uid"] == "turned"
    assert {row["trajectory_uid"]: (row["before"], row["after"], row["changed"]) for row in worst["trajectories"]} == {
        "turned-0": (0.0, 2.0, True),
        "turned-1": (1.0, 0.0, True),
    }
    assert found["cost"]["seconds"] > 0
    shown = headrace(*command)
    assert "2 of 6 advantages change their sign, in 1 of 3 groups" in shown.out
    assert "turned-0" in shown.out
    assert {path.name: path.read_bytes() for path in recorded.glob("*.seg")} == before


def test_a_trial_compares_two_rewards_and_counts_a_judges_tokens(
    headrace: Command, renderer: Renderer, folder: Path, tmp_path: Path
) -> None:
    judge = Judge()
    judge.go.set()
    with judge.serving() as address, DataPool() as pool, serving_pool(pool) as target:
        for n, said in enumerate(["a", "abcd", "ab"]):
            record(pool, renderer, f"t{n}", [("q", said)], prompt_uid="p", n_rollouts=3, row={"answer": "a"})
        new = write(tmp_path / "new.json", {"judge": {"address": address, "model": "j"}})
        old = write(tmp_path / "old.json", {"rules": ["exact_match"]})
        options = ["--pool", target, "--tokenizer-path", folder, "--against", old, "--json"]
        done = headrace("reward", "try", new, *options)
        assert done.code == 0, done.err
        assert all(row["reward"] is None for row in pool.list_trajectories()["items"])
    found = json.loads(done.out)
    assert found["signs"] == {"trajectories": 3, "changed": 2, "groups": 1, "groups_changed": 1}
    assert (found["cost"]["judge_tokens_in"], found["cost"]["judge_tokens_out"]) == (300, 30)


def test_what_cannot_work_is_said_before_anything_is_started(headrace: Command, folder: Path, tmp_path: Path) -> None:
    reward = write(tmp_path / "reward.json", {"rules": ["exact_match"]})
    wrong = write(tmp_path / "wrong.json", {"rules": ["exact_mach"]})
    with DataPool(tmp_path / "empty", durability="os") as pool:
        pool.configure("train", n_rollouts=2)
    for args, code, said in (
        (["start", "--reward", reward], 2, "--pool must be given"),
        (["start", "--reward", reward, "--pool", "http://127.0.0.1:9"], 2, "--tokenizer-path must be given too"),
        (["start", "--reward", wrong, "--name", "n"], 2, "exact_match"),
        (["start", "--reward", reward, "--name", "n", "--resource", "x"], 2, "NAME=AMOUNT"),
        (["try", reward, "--pool", tmp_path / "none", "--tokenizer-path", folder], 1, "no journal"),
        (["try", reward, "--pool", tmp_path / "empty", "--tokenizer-path", folder], 1, "no complete trajectory"),
    ):
        done = headrace("reward", *args)
        assert (done.code, done.out) == (code, ""), done
        assert said in done.err
