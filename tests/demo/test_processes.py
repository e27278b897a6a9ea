"""Children of the demo: none is left behind, and one that dies is told of."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.processes import Child, ChildDied, Processes

#: A module that says that it is ready and then waits; with `deaf`, SIGTERM does not end it; with `starts`, it starts
#: another process, which nothing ends.
PROGRAM = """
import signal, subprocess, sys, time
if "starts" in sys.argv:
    print("started", subprocess.Popen(["sleep", "600"]).pid, flush=True)
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "busy" in sys.argv:
    while time.process_time() < 1.5: pass
print("engine ready on http://127.0.0.1:1", flush=True)
if "fails" in sys.argv:
    sys.exit("out of luck")
time.sleep(600)
"""


#: A process that Ctrl-C reaches while it starts a child: in another thread, which has not blocked it, and as Python
#: runs what was registered to follow a fork.
INTERRUPTED = """
import os, signal, sys, threading
from pathlib import Path
from headrace.processes import Processes

forked, pressed = threading.Event(), threading.Event()

def press():
    forked.wait()
    os.kill(os.getpid(), signal.SIGINT)
    pressed.set()

def follow():
    forked.set()
    pressed.wait()

threading.Thread(target=press).start()
os.register_at_fork(after_in_parent=follow)
with Processes(Path(sys.argv[1])) as processes:
    try:
        processes.start("engine", "waiting")
        print("nobody was interrupted")
    except KeyboardInterrupt:
        print("interrupted with", *(child.name for child in processes.children))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "waiting.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "waiting"


def gone(child: Child) -> bool:
    return child.process.returncode is not None


def test_the_address_is_read_from_the_ready_line(program: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        assert processes.start("engine", program).ready("engine") == "http://127.0.0.1:1"


def test_all_are_ended_however_the_demo_ends(program: str, tmp_path: Path) -> None:
    children: list[Child] = []

    def interrupted() -> None:
        with Processes(tmp_path) as processes:
            children.extend(processes.start(name, program) for name in ("a", "b"))
            for child in children:
                child.ready("engine")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(map(gone, children))


@pytest.mark.usefixtures("program")
def test_ctrl_c_during_the_start_of_a_child_is_heard_once_it_is_known(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "interrupted with engine\n"


def test_who_does_not_listen_is_killed(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.processes.END_S", 0.1)
    with Processes(tmp_path) as processes:
        child = processes.start("engine", program, "deaf")
        child.ready("engine")
    assert child.process.returncode == -signal.SIGKILL


def interrupted_again(processes: Processes, child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves processes by Ctrl-C, and has another come while this child, which does not listen, is waited for."""

    def wait(timeout: float) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(child.process, "wait", wait)
    processes.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has descriptors of processes")
@pytest.mark.parametrize("how", ["told", "fails", "killed", "deaf"])
def test_what_a_child_started_and_left_behind_is_ended_too(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with Processes(tmp_path) as processes:
        child = processes.start("engine", program, "starts", how)
        child.ready("engine")
        watched = os.pidfd_open(int(child.said().split()[1]))
        if how == "fails":
            child.process.wait()
        elif how == "killed":
            child.process.kill()
        elif how == "deaf":
            interrupted_again(processes, child, monkeypatch)
    assert select.select([watched], [], [], 60)[0] == [watched]
    os.close(watched)


def test_one_that_died_is_named_with_the_end_of_its_log(program: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        child = processes.start("engine", program, "fails")
        child.process.wait()
        with pytest.raises(ChildDied, match="engine ended with code 1") as found:
            processes.check()
        assert found.value.tail.splitlines()[-1] == "out of luck"


def test_one_that_was_killed_is_named_with_the_signal(program: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        child = processes.start("engine", program)
        child.ready("engine")
        child.process.kill()
        child.process.wait()
        with pytest.raises(ChildDied, match="engine was ended by SIGKILL"):
            processes.check()


def test_one_that_dies_before_it_is_ready_is_told_at_once(program: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes, pytest.raises(ChildDied):
        processes.start("engine", program, "fails").ready("gateway")


def test_a_log_of_an_earlier_run_is_not_taken_for_this_ones(program: str, tmp_path: Path) -> None:
    (tmp_path / "engine.log").write_text("engine ready on http://127.0.0.1:2\n")
    with Processes(tmp_path) as processes:
        assert processes.start("engine", program).ready("engine") == "http://127.0.0.1:1"


def test_what_cpu_a_child_took_is_known_once_it_ended(program: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        busy, idle = processes.start("busy", program, "busy"), processes.start("idle", program)
        busy.ready("engine")
        idle.ready("engine")
    assert processes.cpu_s["busy"] > 1.5 > processes.cpu_s["idle"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_children_end_with_a_demo_that_was_killed(program: str, tmp_path: Path) -> None:
    script = (
        "import pathlib, time; from headrace.processes import Processes\n"
        f"child = Processes(pathlib.Path({str(tmp_path)!r})).start('engine', {program!r})\n"
        "child.ready('engine'); print(child.process.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    watched = os.pidfd_open(pid)
    parent.kill()
    parent.communicate()
    assert select.select([watched], [], [], 60)[0] == [watched]
    os.close(watched)
