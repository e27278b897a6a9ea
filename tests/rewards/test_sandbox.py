"""What a program in the sandbox cannot do, each tried by one, with and without namespaces; and what it can."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from headrace.data.errors import InvalidInput
from headrace.rewards import Reward, RewardConfig, RewardFailure, Sample, Sandbox, SandboxLimits, SandboxUnavailable
from headrace.rewards.sandbox import SandboxResult

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux'")

#: Seconds that a busy machine does not come near, which takes ten times as long for the same.
LIMITS = SandboxLimits(cpu_s=60, wall_s=120, memory_mb=256, processes=8, files_mb=2)
#: Seconds in which what was killed is gone: the kernel needs milliseconds.
PATIENCE_S = 60.0


@pytest.fixture(params=[True, False], ids=["namespaces", "none"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return Sandbox(LIMITS, namespaces=request.param)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everyone on the machine may read and write."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def refused(result: SandboxResult, words: str) -> bool:
    return result.exit_code not in (0, None) and words in result.stderr


def test_a_program_computes_reads_its_input_and_writes_into_its_folder(sandbox: Sandbox) -> None:
    program = "open('a', 'w').write(input()); import json; print(open('a').read(), open('b').read(), 1 + 1)"
    result = sandbox.run(program, stdin="given\n", files={"b": "beside"})
    assert (result.ended, result.exit_code, result.stdout) == ("exit", 0, "given beside 2\n"), result.stderr
    assert {"files", "network", "processes", "signals"} <= set(result.held)


def test_one_that_fails_tells_how(sandbox: Sandbox) -> None:
    result = sandbox.run("import sys; print('so far'); sys.exit('no more')")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "so far\n", "no more\n")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("while True: pass", id="loop"),
        pytest.param("import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass", id="handler"),
    ],
)
@pytest.mark.parametrize("namespaces", [True, False])
def test_an_endless_loop_ends_with_its_processor_time(program: str, namespaces: bool) -> None:
    limits = LIMITS.model_copy(update={"cpu_s": 1})
    assert Sandbox(limits, namespaces=namespaces).run(program).ended == "cpu"


def test_one_that_waits_ends_by_the_clock() -> None:
    for wall_s in (3.0, 12.0, 60.0):  # the clock runs while a program is confined, which may take a busy machine longer
        try:
            result = Sandbox(LIMITS.model_copy(update={"wall_s": wall_s})).run("import time; time.sleep(3600)")
            break
        except SandboxUnavailable as error:
            if wall_s == 60.0 or "did not start in time" not in str(error):
                raise
    assert (result.ended, result.exit_code) == ("wall", None)


def test_memory_is_bounded(sandbox: Sandbox) -> None:
    assert refused(sandbox.run("found = []\nwhile True: found.append(bytearray(1 << 24))"), "MemoryError")


def runs_a_program(process: psutil.Process) -> bool:
    """Whether it is of a sandbox, and no zombie; other tests keep processes too, such as a Ray cluster's."""
    try:
        return "program.py" in process.cmdline()
    except psutil.Error:
        return False


def test_processes_are_bounded_and_end_with_the_program(sandbox: Sandbox) -> None:
    bomb = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(3600)
        count += 1
except OSError:
    print(count)
"""
    result = sandbox.run(bomb)
    assert result.exit_code == 0, result.stderr
    assert 0 < int(result.stdout) < LIMITS.processes
    assert not [child for child in psutil.Process().children(recursive=True) if runs_a_program(child)]


def test_what_is_left_behind_is_ended(sandbox: Sandbox) -> None:
    # Its output stays open in the child, which a reader of it would otherwise wait for.
    result = sandbox.run("import subprocess; subprocess.Popen(['sleep', '3600']); print('left')")
    assert (result.ended, result.stdout) == ("exit", "left\n")


def test_no_new_session_is_begun(sandbox: Sandbox) -> None:
    result = sandbox.run("import os\nif os.fork() == 0: os.setsid()\nelse: os.wait()")
    assert "Operation not permitted" in result.stderr


def test_files_are_bounded(sandbox: Sandbox) -> None:
    result = sandbox.run("open('large', 'wb').write(bytes(8 << 20))")
    assert result.exit_code != 0
    assert "File too large" in result.stderr or "No space left" in result.stderr


def test_output_is_bounded() -> None:
    result = Sandbox(LIMITS.model_copy(update={"output_kb": 1})).run("print('x' * 1_000_000)")
    assert (result.exit_code, result.stdout) == (0, "x" * 1024)


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_there_is_no_network(sandbox: Sandbox, family: str) -> None:
    assert refused(sandbox.run(f"import socket; socket.socket(socket.{family})"), "not permitted")


def test_a_server_of_this_machine_is_not_reached(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert refused(sandbox.run(f"import socket; socket.create_connection(('127.0.0.1', {port}))"), "not permitted")


def test_io_uring_leads_around_nothing(sandbox: Sandbox) -> None:
    ring = "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.syscall(425, 1, None), ctypes.get_errno())"
    assert sandbox.run(ring).stdout == "-1 1\n"


def test_nothing_is_written_outside(sandbox: Sandbox, shared: Path) -> None:
    there, new = shared / "there", shared / "new"
    there.write_text("untouched")
    there.chmod(0o666)
    for program in (f"open({str(there)!r}, 'w')", f"import os; os.unlink({str(there)!r})", f"open({str(new)!r}, 'w')"):
        assert refused(sandbox.run(program), "PermissionError")
    assert there.read_text() == "untouched"
    assert list(shared.iterdir()) == [there]


def test_files_of_others_are_not_read(sandbox: Sandbox, shared: Path) -> None:
    secret = shared / "secret"
    secret.write_text("hidden")
    secret.chmod(0o666)
    read = f"print(open({str(secret)!r}).read())"
    assert refused(sandbox.run(read), "PermissionError")
    allowed = Sandbox(LIMITS, readable=[shared]).run(read)
    assert allowed.stdout == "hidden\n", allowed.stderr


def test_the_environment_holds_nothing_of_ours(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "geheim")
    result = sandbox.run("import os; print(dict(os.environ))")
    assert result.exit_code == 0
    assert "geheim" not in result.stdout
    assert "MY_API_KEY" not in result.stdout


def test_nor_is_that_of_this_process_read(sandbox: Sandbox) -> None:
    assert refused(sandbox.run(f"print(open('/proc/{os.getpid()}/environ').read())"), "PermissionError")


def test_no_process_outside_is_signalled(sandbox: Sandbox) -> None:
    result = sandbox.run(f"import os; os.kill({os.getpid()}, 0)")
    assert refused(result, "PermissionError") or refused(result, "ProcessLookupError")


#: Tries what reaches another process of the same user, and itself, where the filter alone stands between them.
FILTERED = """
import ctypes, fcntl, json, os, platform, resource, signal, socket, struct, sys, threading
from headrace.rewards import sandbox_child

other, me = int(sys.argv[1]), os.getpid()
seen, _ = os.pipe()
one, _two = socket.socketpair()
opened = os.pidfd_open(other)

def called(name, *values):
    if sandbox_child.LIBC.syscall(sandbox_child.REACHING[platform.machine()][name], *values):
        raise OSError(ctypes.get_errno(), name)

attempts = {
    "kill": lambda: os.kill(other, 0),
    "everyone": lambda: os.kill(-1, 0),
    "own group": lambda: os.kill(0, 0),
    "tkill": lambda: called("tkill", other, 0),
    "tgkill": lambda: called("tgkill", other, other, 0),
    "rt_sigqueueinfo": lambda: called("rt_sigqueueinfo", other, 0, None),
    "rt_tgsigqueueinfo": lambda: called("rt_tgsigqueueinfo", other, other, 0, None),
    "pidfd": lambda: signal.pidfd_send_signal(opened, 0),
    "owner of a pipe": lambda: fcntl.fcntl(seen, fcntl.F_SETOWN, other),
    "owner of a socket": lambda: fcntl.ioctl(one, sandbox_child.FIOSETOWN, struct.pack("i", other)),
    "limits": lambda: resource.prlimit(other, resource.RLIMIT_CPU),
    "itself": lambda: os.kill(me, 0),
    "own thread": lambda: signal.pthread_kill(threading.get_ident(), 0),
    "own limits": lambda: resource.prlimit(me, resource.RLIMIT_CPU),
    "own flags": lambda: fcntl.fcntl(seen, fcntl.F_GETFD),
}
sandbox_child.LIBC.prctl(sandbox_child.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
assert sandbox_child.seccomp(signals=True, limits=True)
refused = []
for name, attempt in attempts.items():
    try:
        attempt()
    except PermissionError:
        refused.append(name)
print(json.dumps(refused), flush=True)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
os.abort()
"""


def test_where_only_a_filter_can_be_had_a_program_signals_itself_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FILTERED, str(os.getpid())], capture_output=True, check=False)
    assert json.loads(done.stdout or "[]") == [
        *("kill", "everyone", "own group", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd"),
        *("owner of a pipe", "owner of a socket", "limits"),
    ], done.stderr
    assert done.returncode == -signal.SIGABRT


RUNNER = """
import sys
from headrace.rewards import Sandbox, SandboxLimits
Sandbox(SandboxLimits(wall_s=600), namespaces=sys.argv[1] == "True").run(sys.argv[2])
"""
STARTS_ANOTHER = "import subprocess, time; subprocess.Popen(['sleep', '3600']); time.sleep(3600)"


def is_running(process: psutil.Process, name: str = "") -> bool:
    """Whether a process, of this name where one is given, is there and no zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and name in process.name()
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "none"])
def test_a_program_and_all_that_it_started_end_with_the_process_that_runs_it(namespaces: bool) -> None:
    started: list[psutil.Process] = []
    with subprocess.Popen([sys.executable, "-c", RUNNER, str(namespaces), STARTS_ANOTHER]) as runner:
        try:
            while not any(is_running(process, "sleep") for process in started):
                assert runner.poll() is None
                time.sleep(0.05)
                started = psutil.Process(runner.pid).children(recursive=True)
        finally:
            runner.kill()
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_running, started)) and time.monotonic() < deadline:
        time.sleep(0.01)
    left = [process for process in started if is_running(process)]
    for process in left:
        process.kill()
    assert not left


async def test_closing_ends_a_program_that_runs_and_does_not_wait_for_it() -> None:
    config = RewardConfig.of({"rules": [{"use": "unit_tests", "limits": {"wall_s": 600}}]})
    sample = Sample(text="```\nimport time\ntime.sleep(3600)\n```", ground_truth="assert True")
    async with Reward(config) as reward:
        scoring = asyncio.create_task(reward.score([sample, sample, sample]))
        while not any(map(runs_a_program, psutil.Process().children(recursive=True))):
            await asyncio.sleep(0.05)
    for outcome in await scoring:
        assert isinstance(outcome, RewardFailure)
        assert (outcome.reason, outcome.again) == ("unavailable", True)
    assert not any(map(runs_a_program, psutil.Process().children(recursive=True)))


def test_one_that_was_closed_runs_nothing() -> None:
    closed = Sandbox(LIMITS)
    closed.close()
    with pytest.raises(SandboxUnavailable, match="was closed"):
        closed.run("print(1)")


def test_nothing_is_left_of_a_run(sandbox: Sandbox, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    result = sandbox.run("import os; os.makedirs('a/b'); open('a/b/c', 'w').write('x')")
    assert result.exit_code == 0, result.stderr
    assert list(shared.iterdir()) == []


async def test_a_machine_that_cannot_confine_says_so_at_the_start_and_fails_each_sample_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headrace.rewards.sandbox.MUST_HOLD", ("files", "a moat"))
    with pytest.raises(SandboxUnavailable, match="a moat cannot be held"):
        Sandbox(LIMITS).run("print(1)")
    assert Sandbox(LIMITS, trusted=True).run("print(1)").stdout == "1\n"
    async with Reward(RewardConfig(rules=[{"use": "unit_tests"}], retries=1)) as reward:
        with pytest.raises(InvalidInput, match=r"unit_tests: .*a moat cannot be held.*say `trusted: true`"):
            await reward.ready()
        (outcome,) = await reward.score([Sample(text="```\nx = 1\n```", ground_truth="assert x == 1")])
    assert isinstance(outcome, RewardFailure)
    assert (outcome.reason, outcome.again) == ("unavailable", False)
    assert reward.counters.retried == 0


async def test_one_that_can_or_that_is_trusted_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Reward(RewardConfig(rules=[{"use": "unit_tests"}])) as reward:
        await reward.ready()
    monkeypatch.setattr("headrace.rewards.sandbox.MUST_HOLD", ("a moat",))
    async with Reward(RewardConfig(rules=[{"use": "unit_tests", "trusted": True}])) as reward:
        await reward.ready()


@pytest.mark.parametrize("trusted", [True, False])
def test_another_system_than_linux_runs_nothing_whoever_is_trusted(
    trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="by means of Linux, and this is darwin") as refusal:
        Sandbox(LIMITS, trusted=trusted).run("print(1)")
    assert not refusal.value.again
