"""Several processes on one port behave as one gateway; each can die without anyone losing a token."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvloop
from tests.engine.kit import Client
from tests.gateway.kit import await_ready, told, until, workers_of

from headrace import Step, connect
from headrace.gateway.fork_server import MAX_LINE_BYTES, ForkServerGone, WorkerForkServer, lines_of
from headrace.pool.readonly import JournalView

WORKERS = 2
PATIENCE_S = 240
#: How often a conversation is played until none of its calls was too late for what it waits for.
TRIES = 5


class Gateway:
    """`python -m headrace.gateway --workers 2`, and its workers."""

    def __init__(self, log: Path, *flags: str, kill_first: bool = False) -> None:
        """With `kill_first`, the first worker is killed while it starts. `log` has what it says to an operator."""
        command = [sys.executable, "-m", "headrace.gateway", "--host", "127.0.0.1", "--port", "0", *flags]
        self.log = log
        with log.open("w") as said:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        assert self.process.stdout is not None
        if kill_first:
            until(lambda: bool(self.workers))
            self.workers[0].kill()
        said = self.process.stdout.readline()
        assert said.startswith("gateway listening on "), said
        self.address = said.split()[-1]

    @property
    def workers(self) -> list[psutil.Process]:
        return workers_of(self.process)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def started(engine: Client, folder: Path, journal: Path, *more: str, kill_first: bool = False) -> Iterator[Gateway]:
    flags = ["--vllm-addresses", f"http://{engine.host}", "--tokenizer-path", str(folder), "--workers", str(WORKERS)]
    log = journal.with_name(f"{journal.name}.log")
    running = Gateway(log, *flags, "--journal", str(journal), *more, kill_first=kill_first)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait(PATIENCE_S)
        assert running.process.stdout is not None
        running.process.stdout.close()


@pytest.fixture(scope="module")
def gateway(engine: Client, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One for all tests that leave it running: starting takes a while."""
    base = tmp_path_factory.mktemp("gateway")
    (base / "reward.json").write_text('{"rules": [{"use": "exact_match"}]}')
    with started(engine, folder, base / "journal", "--open", "--reward", str(base / "reward.json")) as running:
        await_ready(running.address)
        yield running


def fresh(method: str, url: str, body: Any = None, headers: dict[str, str] | None = None) -> httpx.Response:
    """A request on a connection of its own, so that any of the workers may get it."""
    with httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
        return client.request(method, url, json=body, headers=headers)


def by_worker(gateway: Gateway, name: str) -> dict[str, float]:
    """A metric's value in each worker, added up over its other labels."""
    found: dict[str, float] = {}
    for line in fresh("GET", f"{gateway.address}/metrics").text.splitlines():
        match = re.match(rf'headrace_gateway_{name}\{{.*worker="(\d+)"\}} (\S+)', line)
        if match:
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def converse(gateway: Gateway, base: str, turns: int, messages: list[dict[str, str]]) -> None:
    for turn in range(turns):
        messages.append({"role": "user", "content": f"turn {turn}"})
        answer = told(
            fresh("POST", f"{base}/v1/chat/completions", {"messages": messages, "max_tokens": 6, "seed": turn})
        )
        messages.append(answer["choices"][0]["message"])


def steps_of(gateway: Gateway, play: Callable[[str], None]) -> Sequence[Step]:
    """The steps of a trajectory that is played at its base_url. A call waits for a second to read what other workers
    sampled, and on a busy machine it then goes on without: such a trajectory is played anew."""
    for _ in range(TRIES):
        said = gateway.log.stat().st_size
        begun = told(fresh("POST", f"{gateway.address}/init_trajectory"))
        play(begun["base_url"])
        if b"could not be read anew" not in gateway.log.read_bytes()[said:]:
            break
    else:
        raise AssertionError(f"in {TRIES} tries a worker never read in time what the others sampled")
    return connect(gateway.address).trajectory(begun["trajectory_uid"]).steps


def test_a_conversation_goes_on_in_whichever_worker_its_next_call_lands(gateway: Gateway) -> None:
    steps = steps_of(gateway, lambda base: converse(gateway, base, 24, []))
    assert [step.step_index for step in steps] == list(range(24))
    for before, step in pairwise(steps):
        whole = [*before.prompt_ids, *before.response_ids]
        assert step.prompt_ids.tolist()[: len(whole)] == whole
    assert len(by_worker(gateway, "steps_total")) == WORKERS, "all calls landed in one worker: nothing was shown"


def test_a_conversation_that_has_no_name_is_found_by_every_worker(gateway: Gateway) -> None:
    converse(gateway, gateway.address, 12, [])
    pool = connect(gateway.address)
    (found,) = [row for row in pool.list_trajectories("train")["items"] if row["trajectory_uid"].startswith("live-")]
    assert found["steps"] == 12


def test_tries_of_a_named_call_that_come_at_once_to_several_workers_are_one_call(gateway: Gateway) -> None:
    begun = told(fresh("POST", f"{gateway.address}/init_trajectory"))

    def ask(name: str) -> str:
        body = {"messages": [{"role": "user", "content": name}], "max_tokens": 12, "temperature": 1}
        url = f"{begun['base_url']}/v1/chat/completions"
        return str(told(fresh("POST", url, body, {"idempotency-key": name}))["id"])

    for number in range(8):
        with ThreadPoolExecutor(6) as asking:
            answers = list(asking.map(ask, [f"call {number}"] * 6))
        assert len(set(answers)) == 1, "tries of one call were given different answers"
    assert len(connect(gateway.address).trajectory(begun["trajectory_uid"]).steps) == 8


def test_what_is_said_to_one_worker_holds_in_all(gateway: Gateway) -> None:
    told(fresh("POST", f"{gateway.address}/policy_version", {"version": 7}))
    assert by_worker(gateway, "policy_version") == {"0": 7.0, "1": 7.0}
    told(fresh("POST", f"{gateway.address}/pause?mode=drain"))
    assert told(fresh("GET", f"{gateway.address}/stats"))["gateway"]["paused"] is True
    told(fresh("POST", f"{gateway.address}/resume"))
    begun = told(fresh("POST", f"{gateway.address}/init_trajectory"))
    converse(gateway, begun["base_url"], 1, [])
    told(fresh("POST", f"{begun['base_url']}/complete_trajectory", {"reward": 1.0}))
    body = {"messages": [{"role": "user", "content": "more"}], "max_tokens": 2}
    answers = [fresh("POST", f"{begun['base_url']}/v1/chat/completions", body).status_code for _ in range(8)]
    assert answers == [409] * 8, "a worker did not hear that the trajectory is complete"
    assert connect(gateway.address).trajectory(begun["trajectory_uid"]).steps[0].policy_version == 7


def await_all(gateway: Gateway) -> None:
    """Returns once all workers are there and have their tokenizers."""
    until(lambda: len(by_worker(gateway, "policy_version")) == WORKERS)
    await_ready(gateway.address)


def test_a_worker_that_dies_is_replaced_and_knows_what_the_others_know(gateway: Gateway) -> None:
    told(fresh("POST", f"{gateway.address}/policy_version", {"version": 9}))

    def play(base: str) -> None:
        messages: list[dict[str, str]] = []
        converse(gateway, base, 3, messages)
        victim = gateway.workers[0]
        victim.kill()
        psutil.wait_procs([victim], PATIENCE_S)
        await_all(gateway)
        assert set(by_worker(gateway, "policy_version").values()) == {9.0}
        converse(gateway, base, 3, messages)

    steps = steps_of(gateway, play)
    assert len(steps) == 6
    assert steps[5].prompt_ids.tolist()[: len(steps[4].prompt_ids)] == steps[4].prompt_ids.tolist()


def test_a_worker_for_which_there_are_no_descriptors_is_started_once_there_are(gateway: Gateway) -> None:
    await_all(gateway)
    before = resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)
    victim = gateway.workers[1]
    resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        victim.kill()
        until(lambda: "cannot be started now" in gateway.log.read_text() or gateway.process.poll() is not None)
        assert gateway.process.poll() is None, gateway.log.read_text()
    finally:
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, before)
    await_all(gateway)


def test_every_worker_scores_by_a_reward_of_its_own(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    body = {"messages": messages, "dataset_fields": {"answer": "4"}}
    url = f"{gateway.address}/compute_reward"

    def both_have() -> bool:
        assert told(fresh("POST", url, body))["reward_score"] == 1.0
        return len(by_worker(gateway, "rewards_total")) == WORKERS

    until(both_have)


def test_a_large_body_is_refused_before_it_is_handed_to_all(gateway: Gateway) -> None:
    for path in ("/pause", "/servers", "/policy_version"):
        answer = httpx.post(f"{gateway.address}{path}", content=b"x" * 2_000_000, timeout=PATIENCE_S, trust_env=False)
        assert answer.status_code == 413, answer.text


async def test_whatever_a_worker_prints_is_read() -> None:
    stream = asyncio.StreamReader(limit=64)
    stream.feed_data(b'{"a": 1}\n' + b"x" * 3 * MAX_LINE_BYTES + b'\n{"b": 2}\nlast')
    stream.feed_eof()
    found = [line async for line in lines_of(stream)]
    assert (found[0], found[-2:]) == (b'{"a": 1}', [b'{"b": 2}', b"last"])
    assert b"".join(found[1:-2]) == b"x" * 3 * MAX_LINE_BYTES


def test_a_worker_that_is_gone_before_it_has_its_task_is_none_of_its_parents_errors() -> None:
    async def forked_and_gone() -> None:
        forks = WorkerForkServer("tests.gateway.forks")
        worker = await forks.fork()
        worker.send(signal.SIGKILL)
        assert [line async for line in worker.lines()] == []
        worker.give_task(b"{}\n")
        worker.send(signal.SIGTERM)
        unread = await forks.fork()
        unread.send(signal.SIGSTOP)
        unread.give_task(b"x" * 100_000 + b"\n")
        await asyncio.sleep(0)
        unread.send(signal.SIGKILL)
        assert [line async for line in unread.lines()] == []
        forks.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(forked_and_gone())


def test_workers_of_a_fork_server_that_was_killed_live_on_and_the_next_has_another() -> None:
    async def forked_twice() -> None:
        forks = WorkerForkServer("tests.gateway.forks")
        first = await forks.fork()
        killed = psutil.Process(psutil.Process(first.pid).ppid())
        killed.kill()
        psutil.wait_procs([killed], PATIENCE_S)
        with pytest.raises(ForkServerGone):
            await forks.fork()
        second = await forks.fork()
        for number, worker in enumerate((first, second)):
            worker.give_task(f"worker {number}\n".encode())
            assert [line async for line in worker.lines()] == [f"worker {number}".encode()]
        forks.end()
        with pytest.raises(ForkServerGone):
            await forks.fork()
        forks.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(forked_twice())


@pytest.mark.long
def test_a_worker_is_replaced_though_its_fork_server_was_killed(engine: Client, folder: Path, tmp_path: Path) -> None:
    with started(engine, folder, tmp_path / "journal") as gateway:
        await_ready(gateway.address)
        (forks,) = psutil.Process(gateway.process.pid).children()
        victim, other = gateway.workers
        forks.kill()
        psutil.wait_procs([forks], PATIENCE_S)
        victim.kill()
        until(lambda: len(gateway.workers) == 1)
        await_all(gateway)
        begun = told(fresh("POST", f"{gateway.address}/init_trajectory"))
        converse(gateway, begun["base_url"], 4, [])
        workers = [other, *gateway.workers]
        assert gateway.end() == 0
        assert psutil.wait_procs(workers, PATIENCE_S)[1] == []


def test_a_worker_notices_the_end_of_a_parent_that_had_not_read_all_that_it_said() -> None:
    waits = "import os; from headrace.gateway import fork_server; os.write(1, b'x'); fork_server.wait_for_parents_end()"
    ours, its = socket.socketpair()
    with its:
        worker = subprocess.Popen([sys.executable, "-c", waits], stdin=its, stdout=its)
    assert ours.recv(1, socket.MSG_PEEK)
    ours.close()
    assert worker.wait(PATIENCE_S) == 0


def test_no_process_of_a_gateway_loads_torch(gateway: Gateway) -> None:
    await_ready(gateway.address)
    parent = psutil.Process(gateway.process.pid)
    libraries = [{Path(found.path).name for found in one.memory_maps()} for one in (parent, *gateway.workers)]
    assert any("tokenizers" in name for name in set.union(*libraries))
    assert not [name for name in set.union(*libraries) if "torch" in name]


@pytest.mark.long
def test_a_worker_that_is_killed_as_it_starts_is_started_again(engine: Client, folder: Path, tmp_path: Path) -> None:
    with started(engine, folder, tmp_path / "journal", kill_first=True) as running:
        await_ready(running.address)
        assert running.end() == 0


def test_the_end_of_the_parent_is_the_end_of_its_workers(engine: Client, folder: Path, tmp_path: Path) -> None:
    with started(engine, folder, tmp_path / "journal") as gateway:
        workers = gateway.workers
        assert len(workers) == WORKERS
        os.kill(gateway.process.pid, signal.SIGKILL)
        gateway.process.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(workers, PATIENCE_S)
        assert alive == []


def test_sigterm_ends_all_of_them_and_what_was_answered_is_in_the_journal(
    engine: Client, folder: Path, tmp_path: Path
) -> None:
    with started(engine, folder, tmp_path / "journal") as gateway:
        await_ready(gateway.address)
        begun = told(fresh("POST", f"{gateway.address}/init_trajectory"))
        converse(gateway, begun["base_url"], 2, [])
        workers = gateway.workers
        assert gateway.end() == 0
        assert psutil.wait_procs(workers, PATIENCE_S)[1] == []
    with JournalView(tmp_path / "journal") as view:
        assert len(view.trajectory(begun["trajectory_uid"]).steps) == 2


@pytest.mark.long
def test_workers_start_where_the_temporary_folder_leaves_no_room_for_a_socket(
    engine: Client, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with started(engine, folder, tmp_path / "journal") as gateway:
        assert gateway.end() == 0
