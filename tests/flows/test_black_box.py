"""Agents that have nothing but a base_url: functions, coroutines and command lines, good and bad."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.flows.conftest import Made
from tests.gateway.kit import Running, running_gateway, until

from headrace import DataPool
from headrace.data.errors import InvalidInput
from headrace.flows import AgentConfig, AgentFailed, GatewayClient, Task
from headrace.flows.gateway_client import TrajectoryEnded

#: Two turns by the real SDK, as anybody writes them; and the same without await.
ASKS = """
import os
from openai import AsyncOpenAI, OpenAI

async def ask(task, base_url, api_key):
    assert "ground_truth" not in task
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            found = await client.chat.completions.create(model="any", messages=messages, max_tokens=4)
            messages += [found.choices[0].message, {"role": "user", "content": "Again."}]

def ask_and_wait(task, base_url):
    assert "ground_truth" not in task and "ground_truth" not in os.environ["HEADRACE_TASK"]
    with OpenAI() as client:                       # the address and the key are in the environment
        messages = [{"role": "user", "content": task["question"]}]
        for _ in range(2):
            found = client.chat.completions.create(model="any", messages=messages, max_tokens=4)
            messages += [found.choices[0].message, {"role": "user", "content": "Again."}]
"""

#: Calls of the model by a shell.
CURL = """
test "$(cat)" = "$HEADRACE_TASK" || exit 9
question=$(printf %s "$HEADRACE_TASK" | python3 -c 'import json, sys; print(json.load(sys.stdin)["question"])')
for turn in 1 2; do
  curl -fsS "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" --json \
    "{\\"max_tokens\\": 4, \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$question\\"}]}"
done
"""

#: What one call of the model takes, for agents that go wrong after it.
CALL = """
import os, signal, subprocess, sys, threading, time, urllib.request, json

def call(base_url):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    asked = urllib.request.Request(base_url + "/v1/chat/completions", json.dumps(body).encode(),
                                   {"content-type": "application/json"})
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked).read()
"""


def agent(folder: Path, text: str, name: str = "agent.py") -> None:
    (folder / name).write_text(text)


def held(gateway: Running, task: Task) -> Any:
    return gateway.pool.trajectory(task.trajectory_uid)


async def failure(made: Made, task: Task, **config: Any) -> AgentFailed:
    with pytest.raises(AgentFailed) as caught:
        await made(**config).run(task)
    return caught.value


def check_failed(gateway: Running, task: Task, failed: AgentFailed) -> None:
    """The pool knows that it failed and why; its name is taken."""
    listed = gateway.pool.list_trajectories(task.channel, prompt_uid=task.prompt_uid, state="failed")["items"]
    assert [(row["trajectory_uid"], row["reason"]) for row in listed] == [(task.trajectory_uid, str(failed))]
    assert gateway.pool.stats()["balanced"]


# -- agents that do their work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"run": "agent.py:ask"},
        {"run": "agent.py:ask", "process": True},
        {"run": "agent.py:ask_and_wait"},
        {"command": "sh agent.sh"},
        {"command": ["sh", "agent.sh"]},
    ],
    ids=lambda config: "-".join(map(str, config.values())).replace("/", "_"),
)
async def test_every_call_of_an_agent_is_a_step(
    made: Made, gateway: Running, task: Task, tmp_path: Path, config: dict[str, Any]
) -> None:
    agent(tmp_path, ASKS)
    agent(tmp_path, CURL, "agent.sh")
    await made(**config).run(task)
    found = held(gateway, task)
    assert (found.complete, len(found.steps), found.prompt_uid) == (True, 2, task.prompt_uid)
    assert found.metadata["ground_truth"] == "7"


async def test_many_rollouts_share_few_processes_and_one_import(
    made: Made, gateway: Running, task: Task, tmp_path: Path
) -> None:
    agent(tmp_path, CALL + "open('imported', 'a').write('x')\ndef go(task, base_url):\n    call(base_url)\n"
          "    open('pids', 'a').write(f'{os.getpid()}\\n')\n")  # fmt: skip
    flow = made(run="agent.py:go")
    for first in range(0, 12, 4):
        await asyncio.gather(*(flow.run(replace(task, rollout=first + at, n_rollouts=12)) for at in range(4)))
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 12
    assert len(set(pids)) <= 4
    assert (tmp_path / "imported").read_text() == "xx"  # where it is checked, and where workers are forked


async def test_sampling_is_what_the_configuration_says_whatever_the_agent_asks(
    made: Made, gateway: Running, task: Task, tmp_path: Path
) -> None:
    agent(tmp_path, ASKS)
    await made(run="agent.py:ask", sampling={"temperature": 0.25}).run(task)
    assert [step.sampling["temperature"] for step in held(gateway, task).steps] == [0.25, 0.25]


async def test_an_agent_gets_its_own_key_and_no_other(
    engine: Any, folder: Path, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_REWARD_KEY", "pays")
    agent(tmp_path, ASKS + "\ndef tell(task, base_url):\n    ask_and_wait(task, base_url)\n"
          "    open('environment', 'w').write(repr(dict(os.environ)))\n")  # fmt: skip
    with (
        DataPool() as pool,
        running_gateway(pool, f"http://{engine.host}", folder, api_key="calls", reward_key="pays") as gateway,
    ):
        client = GatewayClient(gateway.address, "calls", "pays")
        flow = AgentConfig(run="agent.py:tell").made(client, tmp_path)
        await flow.run(task)
        await flow.aclose()
        await client.aclose()
        assert pool.trajectory(task.trajectory_uid).complete
    environment = (tmp_path / "environment").read_text()
    assert "'calls'" in environment
    assert "'pays'" not in environment


async def test_a_task_too_large_for_an_environment_comes_on_stdin(
    made: Made, gateway: Running, task: Task, tmp_path: Path
) -> None:
    agent(tmp_path, CALL + "assert 'HEADRACE_TASK' not in os.environ\n"
          "assert len(json.load(sys.stdin)['text']) == 200_000\ncall(os.environ['HEADRACE_BASE_URL'])\n")  # fmt: skip
    large = replace(task, row={**task.row, "text": "x" * 200_000})
    await made(command="python3 agent.py").run(large)
    assert held(gateway, task).complete


# -- agents that do not ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason", "words"),
    [
        ("raise ValueError('no such tool')", "crashed", "ValueError: no such tool"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "SIGSEGV"),
        ("os._exit(3)", "exit_code", "code 3"),
        ("sys.exit(4)", "exit_code", "code 4"),
        ("print('flood ' * 10, file=sys.stderr, flush=True, end='') or exec('for _ in range(200_000): "
         "sys.stderr.write(\"flood \" * 10)') or os._exit(5)", "exit_code", "flood"),  # 12 MB
    ],
    ids=["raises", "segfault", "exits", "sys_exit", "floods"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["run", "command"])
async def test_an_agent_that_ends_badly_fails_its_trajectory_with_the_reason(
    made: Made, gateway: Running, task: Task, tmp_path: Path, kind: str, body: str, reason: str, words: str
) -> None:
    agent(tmp_path, f"{CALL}\ndef go(task, base_url):\n    call(base_url)\n    {body}\n"
          "if __name__ == '__main__':\n    go({}, os.environ['HEADRACE_BASE_URL'])\n")  # fmt: skip
    config = {"run": "agent.py:go"} if kind == "run" else {"command": ["python3", "agent.py"]}
    failed = await failure(made, task, **config)
    assert failed.reason == ("exit_code" if (kind, body[:5]) == ("command", "raise") else reason)
    assert words in str(failed)
    assert len(failed.output) <= 4_000
    check_failed(gateway, task, failed)


@pytest.mark.parametrize(
    "config", [{"run": "agent.py:go"}, {"command": "python3 agent.py; true"}], ids=["run", "command"]
)
async def test_an_agent_that_hangs_is_ended_with_all_that_it_started(
    made: Made, gateway: Running, task: Task, tmp_path: Path, config: dict[str, Any]
) -> None:
    agent(tmp_path, CALL + """
def go(task, base_url):
    call(base_url)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    with open("written", "w") as file:
        file.write(json.dumps([os.getpid(), child.pid]))
    os.rename("written", "pids")
    print("waiting for nothing", flush=True)
    time.sleep(3600)
if __name__ == "__main__":
    go({}, os.environ["HEADRACE_BASE_URL"])
""")  # fmt: skip
    flow = made(**config)
    running = asyncio.ensure_future(flow.run(task))
    await asyncio.to_thread(until, (tmp_path / "pids").exists)
    # The limit is as good as over: it could not be chosen before, on a machine of unknown speed.
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for pid in json.loads((tmp_path / "pids").read_text()):
        await asyncio.to_thread(until, lambda pid=pid: not alive(pid))
    (row,) = gateway.pool.list_trajectories(prompt_uid=task.prompt_uid, state="failed")["items"]
    assert row["reason"] == "cancelled"


@pytest.mark.parametrize("body", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["exits", "killed"])
async def test_a_process_that_ends_by_itself_takes_with_it_all_that_it_started(
    made: Made, gateway: Running, task: Task, tmp_path: Path, body: str
) -> None:
    agent(tmp_path, CALL + "def go(task, base_url):\n    call(base_url)\n"
          "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
          f"    open('pid', 'w').write(str(child.pid))\n    {body}\n")  # fmt: skip
    await failure(made, task, run="agent.py:go")
    pid = int((tmp_path / "pid").read_text())
    await asyncio.to_thread(until, lambda: not alive(pid))


@pytest.mark.parametrize("run", ["agent.py:go", "agent.py:wait"])
async def test_an_agent_that_takes_too_long_has_hung(
    made: Made, gateway: Running, task: Task, tmp_path: Path, run: str
) -> None:
    agent(tmp_path, "import asyncio, time\ndef go(task, base_url):\n    time.sleep(3600)\n"
          "async def wait(task, base_url):\n    await asyncio.sleep(3600)\n")  # fmt: skip
    flow = made(run=run, timeout_s=1.5)
    failed = await failure(lambda **_: flow, task)
    assert (failed.reason, failed.detail) == ("hung", "it did not end within 1.5 s")
    check_failed(gateway, task, failed)


async def test_what_a_command_printed_before_it_hung_is_told(made: Made, gateway: Running, task: Task) -> None:
    for attempt, timeout_s in enumerate((3, 60)):  # a busy machine may begin it later than the first allows
        trial = replace(task, attempt=attempt)
        failed = await failure(made, trial, command="echo where I am; sleep 3600", timeout_s=timeout_s)
        if failed.output:
            break
    assert failed.output == "where I am"
    assert "where I am" in str(failed)


@pytest.mark.parametrize("config", [{"run": "agent.py:idle"}, {"run": "agent.py:go"}, {"command": "true"}], ids=str)
async def test_an_agent_that_never_calls_the_model_has_failed(
    made: Made, gateway: Running, task: Task, tmp_path: Path, config: dict[str, Any]
) -> None:
    agent(tmp_path, "async def idle(task, base_url): ...\ndef go(task, base_url): ...\n")
    failed = await failure(made, task, **config)
    assert failed.reason == "no_calls"
    check_failed(gateway, task, failed)


async def test_a_crash_holds_up_no_other_and_the_next_rollout_has_a_new_process(
    made: Made, gateway: Running, task: Task, tmp_path: Path
) -> None:
    agent(tmp_path, CALL + "def go(task, base_url):\n    call(base_url)\n"
          "    if task['kill']:\n        os.kill(os.getpid(), signal.SIGKILL)\n")  # fmt: skip
    flow = made(run="agent.py:go")
    tasks = [replace(task, rollout=at, n_rollouts=6, row={**task.row, "kill": at % 2 == 0}) for at in range(6)]
    ends = await asyncio.gather(*(flow.run(one) for one in tasks), return_exceptions=True)
    assert [getattr(end, "reason", None) for end in ends] == ["crashed", None] * 3
    await flow.run(replace(tasks[0], attempt=1, row={**task.row, "kill": False}))
    assert held(gateway, replace(tasks[0], attempt=1)).complete


async def test_agents_go_on_where_the_process_that_forks_them_is_killed(
    made: Made, gateway: Running, task: Task, tmp_path: Path
) -> None:
    agent(
        tmp_path, CALL + "def go(task, base_url):\n    call(base_url)\n    open('ppid', 'w').write(str(os.getppid()))\n"
    )
    flow = made(run="agent.py:go")
    await flow.run(task)
    forks = int((tmp_path / "ppid").read_text())
    os.kill(forks, signal.SIGKILL)
    await asyncio.to_thread(until, lambda: not alive(forks))
    later = [replace(task, rollout=1, attempt=at) for at in range(3)]
    ends = [await asyncio.gather(flow.run(one), return_exceptions=True) for one in later]
    # The first may have been given to a worker before its end was known.
    assert ends[1:] == [[None], [None]]
    assert held(gateway, later[2]).complete


@pytest.mark.parametrize(
    "leaves",
    [
        "threading.Thread(target=time.sleep, args=(3600,)).start()",
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])",
    ],
    ids=["thread", "process"],
)
async def test_a_worker_whose_agent_left_something_behind_is_not_used_again(
    made: Made, gateway: Running, task: Task, tmp_path: Path, leaves: str
) -> None:
    agent(tmp_path, CALL + "def go(task, base_url):\n    call(base_url)\n"
          "    open('pids', 'a').write(f'{os.getpid()} ')\n"
          f"    {leaves}\n")  # fmt: skip
    flow = made(run="agent.py:go")
    for at in range(2):
        await flow.run(replace(task, rollout=at))
    first, second = map(int, (tmp_path / "pids").read_text().split())
    assert first != second
    await asyncio.to_thread(until, lambda: not alive(first))


async def test_agents_end_with_the_process_that_plays_them(
    gateway: Running, client: GatewayClient, task: Task, tmp_path: Path
) -> None:
    agent(tmp_path, CALL + "def go(task, base_url):\n    open('written', 'w').write(str(os.getpid()))\n"
          "    os.rename('written', 'pid')\n    time.sleep(3600)\n")  # fmt: skip
    agent(tmp_path, f"""
import asyncio, pathlib
from headrace.flows import AgentConfig, GatewayClient, Task

async def main():
    flow = AgentConfig(run="agent.py:go").made(GatewayClient("{gateway.address}"), pathlib.Path("."))
    await flow.run(Task(row={{}}, prompt_uid="{task.prompt_uid}", rollout=0, n_rollouts=1))

asyncio.run(main())
""", "plays.py")  # fmt: skip
    plays = subprocess.Popen([sys.executable, "plays.py"], cwd=tmp_path)
    await asyncio.to_thread(until, lambda: (tmp_path / "pid").exists() or plays.poll() is not None)
    plays.kill()
    plays.wait()
    pid = int((tmp_path / "pid").read_text())
    await asyncio.to_thread(until, lambda: not alive(pid))


async def test_a_rollout_that_had_ended_is_not_played_again(
    made: Made, gateway: Running, task: Task, tmp_path: Path
) -> None:
    agent(tmp_path, ASKS)
    flow = made(run="agent.py:ask")
    await flow.run(task)
    with pytest.raises(TrajectoryEnded):
        await flow.run(task)
    assert len(held(gateway, task).steps) == 2


# -- what is known before anything is started --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"run": "missing.py:go"}, "there is no file .*missing.py"),
        ({"run": "agent.py:asl"}, "has no 'asl'; did you mean ask"),
        ({"run": "agent.py"}, "must be file.py:name"),
        ({"run": "no_such_module:go"}, "there is no module 'no_such_module'"),
        ({"run": "broken.py:go"}, r"ZeroDivisionError: division by zero \(.*broken.py, line 2\)"),
        ({"run": "agent.py:alone"}, r"must take \(task, base_url\)"),
        ({"run": "agent.py:NUMBER"}, "is int, and must be a function"),
        ({"run": "agent.py:alone_and_together", "process": False}, "is no coroutine"),
        ({"command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"command": "  "}, "command"),
        ({"env": "my_env.py"}, "is an environment"),
    ],
    ids=str,
)
async def test_a_wrong_agent_is_known_before_it_runs(
    made: Made, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    agent(tmp_path, "NUMBER = 7\ndef ask(task, base_url): ...\ndef alone(task): ...\n"
          "def alone_and_together(task, base_url): ...\n")  # fmt: skip
    agent(tmp_path, "x = 1\n1 / 0\n", "broken.py")
    with pytest.raises(InvalidInput, match=words):
        made(**config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "exactly one of run, command, flow, env; given: none"),
        ({"run": "a.py:b", "command": "c"}, "given: run and command"),
        ({"command": "c", "process": True}, "process is about `run`"),
        ({"run": "a.py:b", "timeout_s": 0}, "timeout_s"),
        ({"runs": "a.py:b"}, "runs"),
    ],
    ids=str,
)
def test_a_wrong_configuration_of_an_agent_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AgentConfig(**config)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
