"""The stack of a run: services begin when what they need is there, begin again when they die, and end."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.kit import Client
from tests.gateway.kit import running_gateway, told

from headrace import DataPool
from headrace.data.errors import InvalidInput
from headrace.net.server import listener
from headrace.processes import ChildDied, Processes
from headrace.run.services import Service
from headrace.run.stack import MOST_DEATHS, STEADY_S, GatewayHold, RestartPolicy, Stack, reserved_ports

#: Says that it is ready, appends its arguments to a file, and waits; `fails` ends with 3, `done` with 0.
PROGRAM = """
import sys, time
name, *words = sys.argv[1:]
with open(name + ".starts", "a") as file:
    file.write(" ".join(words) + "\\n")
if "fails" in words:
    sys.exit(3)
print(name, "listening on http://127.0.0.1:1", flush=True)
print(name, "ready on http://127.0.0.1:1", flush=True)
if "gives-up" in words:
    sys.exit(3)
if "done" not in words:
    time.sleep(600)
"""


@pytest.fixture
def service(tmp_path: Path) -> Callable[..., Service]:
    (tmp_path / "program.py").write_text(PROGRAM)

    def make(name: str, *words: str, **fields: object) -> Service:
        command = (sys.executable, str(tmp_path / "program.py"), name, *words)
        return Service(name, command, "runs", announces=name, folder=tmp_path, **fields)  # type: ignore[arg-type]

    return make


def look_until(stack: Stack, met: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 300
    while not met():
        assert time.monotonic() < give_up
        stack.look()
        time.sleep(0.02)


def starts(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.starts").read_text().splitlines()


def test_a_service_begins_once_those_that_it_needs_are_there(service: Callable[..., Service], tmp_path: Path) -> None:
    told: list[str] = []
    services = [service("b", after={"a": "ready"}), service("a")]
    with Processes(tmp_path) as processes:
        stack = Stack(services, processes, lambda name, words: told.append(name))
        look_until(stack, lambda: not stack.waiting_for)
    assert told == ["a", "b"]


def test_one_that_was_killed_begins_again_and_takes_others_with_it(
    service: Callable[..., Service], tmp_path: Path
) -> None:
    called: list[str] = []
    services = [service("engine", takes_with=("trainer",)), service("trainer", again=("--resume",))]
    with Processes(tmp_path) as processes:
        stack = Stack(
            services,
            processes,
            lambda name, words: None,
            died=lambda service: called.append(f"{service.name} died"),
            back=lambda service: called.append(f"{service.name} back"),
        )
        look_until(stack, lambda: not stack.waiting_for)
        first = {child.name: child.process.pid for child in processes.children}
        os.kill(first["engine"], signal.SIGKILL)
        look_until(stack, lambda: stack.restarts == {"engine": 1, "trainer": 1} and not stack.waiting_for)
        assert not set(first.values()) & {child.process.pid for child in processes.children}
    assert called == ["engine died", "engine back", "trainer back"]
    assert starts(tmp_path, "trainer") == ["", "--resume"]
    assert starts(tmp_path, "engine") == ["", ""]


@pytest.mark.parametrize(("for_good", "begun"), [(False, ["done", "done --resume"]), (True, ["done"])])
def test_one_that_has_ended_begins_again_with_a_server_unless_it_was_ended_for_good(
    service: Callable[..., Service], tmp_path: Path, for_good: bool, begun: list[str]
) -> None:
    trainer = service("trainer", "done", again=("--resume",), ends=True)
    with Processes(tmp_path) as processes:
        stack = Stack([service("engine", takes_with=("trainer",)), trainer], processes, lambda name, words: None)
        look_until(stack, lambda: stack.has_ended("trainer") and stack.is_ready("engine"))
        if for_good:
            stack.end("trainer")
        (engine,) = processes.children
        engine.process.kill()
        look_until(stack, lambda: stack.restarts["engine"] == 1)
        look_until(stack, lambda: stack.has_ended("trainer") and stack.is_ready("engine"))
    assert starts(tmp_path, "trainer") == begun
    assert stack.restarts["trainer"] == len(begun) - 1


def test_one_that_fails_before_it_was_ready_ends_the_run(service: Callable[..., Service], tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        stack = Stack([service("gateway", "fails")], processes, lambda name, words: None)
        with pytest.raises(ChildDied, match="gateway ended with code 3"):
            look_until(stack, lambda: False)
    assert len(starts(tmp_path, "gateway")) == 1


def test_one_that_gave_up_by_itself_does_not_begin_again(service: Callable[..., Service], tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        stack = Stack([service("rollouter", "gives-up", final=True)], processes, lambda name, words: None)
        with pytest.raises(ChildDied, match="rollouter ended with code 3"):
            look_until(stack, lambda: False)
    assert len(starts(tmp_path, "rollouter")) == 1


def test_one_that_ends_as_it_should_has_ended(service: Callable[..., Service], tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        stack = Stack([service("trainer", "done", ends=True)], processes, lambda name, words: None)
        look_until(stack, lambda: stack.has_ended("trainer"))
    assert stack.restarts == {"trainer": 0}


def test_what_is_held_begins_when_it_is_released(service: Callable[..., Service], tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        stack = Stack([service("a"), service("b")], processes, lambda name, words: None)
        stack.hold("b")
        look_until(stack, lambda: stack.is_ready("a"))
        assert stack.waiting_for == ["b"]
        stack.release("b")
        look_until(stack, lambda: stack.is_ready("b"))


def test_calls_are_held_while_a_server_is_away_where_the_gateway_has_an_admin_key(
    own: Client, pool: DataPool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_ADMIN_KEY", "secret")
    server = f"http://{own.host}"
    with running_gateway(pool, server, folder, admin_key="secret") as gateway:
        gateway.http.headers["authorization"] = "Bearer secret"
        calls = GatewayHold(gateway.address)
        calls.hold()
        assert gateway.counted("paused")
        told(gateway.http.request("DELETE", "/servers", json={"address": server}))
        calls.take_back(server)
        (found,) = told(gateway.get("/servers"))["servers"]
        assert found["address"] == server


def test_deaths_in_a_row_are_answered_ever_later_and_then_no_more() -> None:
    policy = RestartPolicy()
    delays = []
    for _ in range(MOST_DEATHS + 1):
        policy.ready(0.0)
        delays.append(policy.died(1.0))
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, None]


def test_a_death_after_a_steady_time_is_the_first_of_a_row() -> None:
    policy = RestartPolicy()
    for at in (0.0, 10.0, 20.0):
        policy.ready(at)
        policy.died(at + 1)
    policy.ready(30.0)
    assert policy.died(30.0 + STEADY_S) == 0.5


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with listener("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput, match=rf"gateway.port {port} .*name another, or 0"), reserved_ports(1, port):
            pass


def test_reserved_ports_are_all_different_and_can_be_listened_on() -> None:
    with reserved_ports(3) as ports:
        assert len({ports.gateway, *ports.servers}) == 4
        with listener("127.0.0.1", ports.gateway) as door:
            door.listen()
